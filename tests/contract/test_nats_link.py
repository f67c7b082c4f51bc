"""An unusable connection is not waited for and not used again."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import anyio
import pytest
from nats.aio.transport import TcpTransport

from budget_recovery_dagster.adapters.nats import NatsUsageStore, open_usage_store
from budget_recovery_dagster.domain import StoreIdentity
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.errors import StoreUnreachableError
from tests.contract.nats_scene import Scene, set_scene
from tests.hung_servers import hung
from tests.identities import identity_of
from tests.nats_servers import PATIENT, prompt_failure_of, usages


@pytest.fixture
def scene(nats_server: NatsServer) -> Iterator[Scene]:
    with set_scene(nats_server) as scene:
        yield scene


def test_the_end_of_the_drivers_read_task_fails_the_connection(scene: Scene) -> None:
    scene.bucket.put("usage.t.b.2026-11.e", b"1")
    assert usages(scene.store, "t") == {"e": "1"}
    # The driver fails to parse this and still reports that it is connected.
    scene.network.rewrite = lambda answer: b"INFO {\r\n" + answer
    failure = prompt_failure_of(lambda: identity_of(scene.store))
    assert isinstance(failure, StoreUnreachableError)
    assert ": the driver stopped reading" in failure.message
    scene.network.rewrite = lambda answer: answer
    assert usages(scene.store, "t") == {"e": "1"}


def test_a_closing_connection_is_not_used_again(scene: Scene) -> None:
    before = identity_of(scene.store)

    async def ask_while_it_closes() -> StoreIdentity:
        link = scene.store._connection._link
        assert link is not None
        closing = asyncio.create_task(link.close())
        await asyncio.sleep(0)
        assert link.failure is None
        info = await scene.store._stream.info()
        await closing
        return info.identity

    assert scene.store._portal.call(ask_while_it_closes) == before


def test_no_socket_stays_open_to_a_server_that_reads_nothing(
    scene: Scene, nats_server: NatsServer
) -> None:
    async def send_more_than_the_socket_takes(store: NatsUsageStore) -> asyncio.StreamWriter:
        link = await store._connection._usable_link()
        transport = link._client._transport
        assert isinstance(transport, TcpTransport)
        writer = transport._io_writer
        assert writer is not None
        with anyio.move_on_after(1):
            async with link.exchange() as exchange:
                for _ in range(32):  # megabytes
                    await exchange.send("unread", bytes(link._client.max_payload))
        assert writer.transport.get_write_buffer_size() > 0
        return writer

    with ExitStack() as frozen:
        with open_usage_store(nats_server.url, scene.bucket.name, timeouts=PATIENT) as store:
            identity_of(store)
            frozen.enter_context(hung(nats_server.pid))
            writer = store._portal.call(send_more_than_the_socket_takes, store)
            opened = writer.get_extra_info("socket")
        assert opened.fileno() == -1
