"""Messages of a consumer, one by one, as soon as each is there.

The driver's own fetch waits until as many have come as it was asked for, and its way to wait for
one message may swallow a cancellation.

That nothing came for a while says nothing about what is left: a server that was held up lets a pull
expire with its messages undelivered. The end is where a pull that does not wait is told so.
"""

import asyncio
import json
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from budget_recovery_dagster.sandbox.gateway.store import ANSWER_SECONDS, Store, StoreLostError

_AT_ONCE = 500
_IDLE_SECONDS = 1.0

_NOTHING_LEFT = "404"
_EXPIRED = "408"

_WAITING = {"batch": _AT_ONCE, "expires": int(_IDLE_SECONDS * 1e9)}
_NOT_WAITING = {"batch": _AT_ONCE, "no_wait": True}


class Pull:
    """Pulls from a consumer of a stream; a context manager that ends its subscription."""

    def __init__(self, store: Store, stream: str, consumer: str) -> None:
        self._client = store.client
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._inbox = self._client.new_inbox()
        self._subscription: Subscription | None = None
        self._messages: asyncio.Queue[Msg] = asyncio.Queue()
        self._outstanding = 0

    async def __aenter__(self) -> Self:
        self._subscription = await self._client.subscribe(self._inbox, cb=self._messages.put)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._subscription is not None and not self._client.is_closed:
            await self._subscription.unsubscribe()

    async def next(self) -> Msg | None:
        """Return the next message, or None when none came for about a second.

        Raises:
            StoreLostError: the consumer is gone.
            nats.errors.Error, TimeoutError: the server does not answer.
        """
        return await self._next(_WAITING, _EXPIRED)

    async def next_that_is_there(self) -> Msg | None:
        """Return the next message, or None once the server says that nothing is left.

        Raises:
            StoreLostError: the server ended it before that, or the consumer is gone.
            nats.errors.Error, TimeoutError: the server does not answer.
        """
        return await self._next(_NOT_WAITING, _NOTHING_LEFT)

    async def _next(self, request: Mapping[str, object], end: str) -> Msg | None:
        if self._outstanding == 0:
            await self._client.publish(
                self._subject, json.dumps(request).encode(), reply=self._inbox
            )
            self._outstanding = _AT_ONCE
        async with asyncio.timeout(_IDLE_SECONDS + ANSWER_SECONDS):
            message = await self._messages.get()
        if message.reply:  # what comes from a stream tells its place there
            self._outstanding -= 1
            return message
        self._outstanding = 0
        headers = message.headers or {}
        status = headers.get("Status")
        if status != end:
            raise StoreLostError(f"the consumer says: {status} {headers.get('Description', '')}")
        return None
