"""Keys that name nothing, whatever their bytes: none of them silences another one."""

from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from budget_recovery_dagster.adapters.nats import printable
from budget_recovery_dagster.domain import CaptureSource
from budget_recovery_dagster.embedded import NatsServer
from tests.contract.nats_scene import Scene, set_scene
from tests.nats_servers import BOARDS, COUNTERS, publish_raw
from tests.waiting import wait_until

# A subject may contain all but the white space that ends it for the server; dots separate tokens.
BYTES = st.integers(1, 255).filter(lambda byte: byte not in b" \t\r\n.")
# None is the encoding of a name, although some begin or look like one.
ODD = st.sampled_from(
    [b"=", b"=FF", b"=C3", b"=4", b"=zz", b"=41", b"*", b"<", b"\x0b", b"\x0c5", b"\xe9"]
)
HOSTILE = st.one_of(ODD, st.lists(BYTES, min_size=1, max_size=6).map(bytes).map(b"\xff".__add__))
NAMES = ("acme", "globex")
# Bare tenants, tenants that no name encodes, and keys of a tenant that name no counter.
KEYS = st.one_of(
    st.sampled_from([name.encode() for name in NAMES]),
    st.tuples(HOSTILE, HOSTILE).map(b".".join),
    HOSTILE,
    st.tuples(st.sampled_from([name.encode() for name in NAMES]), HOSTILE).map(b".".join),
)


@pytest.fixture
def scene(nats_server: NatsServer) -> Iterator[Scene]:
    with set_scene(nats_server) as scene:
        yield scene


@pytest.mark.parametrize("source", [COUNTERS, BOARDS])
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40
)
@given(keys=st.sets(KEYS, max_size=8))
def test_no_key_silences_another(
    scene: Scene, nats_server: NatsServer, source: CaptureSource, keys: set[bytes]
) -> None:
    scene.bucket.purge("")
    for name in NAMES:
        scene.bucket.spend(name, "team", "2026-11", {"user": "1"})
        scene.bucket.rank(name, "team", "2026-11", {"user": "1"})
    first = {COUNTERS: "usage", BOARDS: "leaderboard"}[source]
    put_raw(scene, nats_server, [f"{first}.".encode() + key for key in keys])
    reader = scene.store.reader(source)
    listing = reader.list_tenants()
    assert listing.tenants == set(NAMES)
    shown = {printable(f"{first}.{key.decode(errors='surrogateescape')}") for key in keys}
    of_tenants: set[str] = set()
    for name in NAMES:
        reading = reader.read(name)
        assert [counter.entity for counter in reading.counters] == ["user"]
        assert {of.budget for of in reading.boards or ()} == {"team"}
        assert not reading.is_partial
        of_tenants |= {bad.key for bad in reading.unreadable}
    # Each is named once: with its tenant, or because it has none.
    assert {bad.key for bad in listing.unreadable} | of_tenants == shown
    assert len(listing.unreadable) + len(of_tenants) == len(shown)


def test_the_boards_of_a_tenant_are_known_despite_names_that_are_not_utf_8(
    scene: Scene, nats_server: NatsServer
) -> None:
    scene.bucket.spend("t", "team", "2026-11", {"user": "1"})
    scene.bucket.rank("t", "team", "2026-11", {"user": "1"})
    put_raw(scene, nats_server, [b"leaderboard.t.\xff.2026-11", b"leaderboard.t.\xfe.2026-11"])
    boards = scene.store.reader(COUNTERS).read("t").boards
    assert boards is not None
    assert {of.budget for of in boards} == {"team"}


def test_an_identity_is_observed_despite_markers_that_are_not_utf_8(
    scene: Scene, nats_server: NatsServer
) -> None:
    put_raw(scene, nats_server, [b"__guard.\xff", b"__guard.\xfe", b"__guard.other"])
    assert "other" in scene.store.observe("ours").others


def put_raw(scene: Scene, server: NatsServer, keys: list[bytes]) -> None:
    """Write keys of any bytes, and wait until they are stored."""
    before = scene.bucket.messages()
    prefix = scene.bucket.subject("").encode()
    publish_raw(server.url, [(prefix + key, b"1") for key in keys])
    wait_until(partial(is_stored, scene, before + len(keys)))


def is_stored(scene: Scene, messages: int) -> bool:
    return scene.bucket.messages() >= messages
