"""Conversations on a connection to NATS: what is sent, and what arrives in answer.

The driver reports half of its failures elsewhere than to the caller: a refused publish and a lost
connection would both look like a slow answer. Here whatever waits is told at once.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from nats import errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from budget_recovery_dagster.adapters.nats_failures import too_large
from budget_recovery_dagster.errors import StoreError, StoreUnreachableError

# The few that we send are far shorter.
_ROOM_FOR_HEADERS = 256


@dataclass(frozen=True, slots=True)
class Failure:
    """What ends an exchange or a link: seen in one place, raised wherever somebody waits."""

    error: StoreError
    cause: Exception | None

    def throw(self) -> NoReturn:
        """Raise the error from its cause."""
        raise self.error from self.cause


class Exchange:
    """One conversation: what is sent in it, and what arrives in answer."""

    def __init__(self, client: Client, inbox: str) -> None:
        self._client = client
        self._inbox = inbox
        self._sent = 0
        self._subscription: Subscription | None = None
        self._sent_to: dict[str, str] = {}
        self._arrived: list[Msg] = []
        self._failure: Failure | None = None
        self._news = asyncio.Event()

    async def open(self) -> None:
        """Make room for answers."""
        self._raise_failure()
        try:
            self._subscription = await self._client.subscribe(
                f"{self._inbox}.*",
                cb=self._deliver,
                # At its limits the driver drops messages.
                pending_msgs_limit=0,
                pending_bytes_limit=0,
            )
        except (errors.Error, OSError) as error:
            self._raise_unsent(error)

    async def close(self) -> None:
        """Take no more answers."""
        if self._subscription is not None:
            # A lost connection has taken the subscription along.
            with contextlib.suppress(errors.Error, OSError):
                await self._subscription.unsubscribe()

    async def send(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> str:
        """Send a request, and return its own subject for answers, which arrive in this exchange.

        An answer shows this subject; what a consumer delivers shows that under which it is stored.

        Raises:
            StoreWriteError: it is larger than the server takes.
        """
        # The server's complaint about a subject reaches us in lower case.
        self._sent_to[subject.lower()] = subject
        self._sent += 1
        answer_to = f"{self._inbox}.{self._sent}"
        self._raise_failure()
        self._require_room(subject, payload, headers)
        try:
            await self._client.publish(
                subject, payload, reply=answer_to, headers=None if headers is None else {**headers}
            )
        except (errors.Error, OSError) as error:
            self._raise_unsent(error)
        return answer_to

    async def receive(self) -> list[Msg]:
        """Wait for messages and return all that have arrived, in order.

        Raises:
            StorePermissionError: the server refused something sent in this exchange.
            StoreUnreachableError: the connection has broken.
        """
        while not self._arrived:
            self._raise_failure()
            self._news.clear()
            await self._news.wait()
        arrived, self._arrived = self._arrived, []
        return arrived

    def fail(self, failure: Failure) -> None:
        """End the exchange: nothing more will arrive."""
        self._failure = failure
        self._news.set()

    def sent_to(self, lowered: str) -> str | None:
        """Return the subject, in its own spelling, if something was sent to it."""
        return self._sent_to.get(lowered)

    async def _deliver(self, message: Msg) -> None:
        self._arrived.append(message)
        self._news.set()

    def _raise_unsent(self, error: Exception) -> NoReturn:
        self._raise_failure()
        raise StoreUnreachableError(
            f"Nothing can be sent to NATS: {error}.", "see whether the NATS server is healthy."
        ) from error

    def _require_room(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None
    ) -> None:
        # The server counts the headers in, and cuts off whoever sends more than it takes.
        size = len(payload) + (_ROOM_FOR_HEADERS if headers else 0)
        if size > self._client.max_payload:
            raise too_large(subject, len(payload), self._client.max_payload)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._failure.throw()
