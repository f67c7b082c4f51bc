"""Another store at our address: a wrong URL, two servers that take turns, a standby cluster.

It must not be taken for our store after a loss, since a restore would write one gateway's counters
into the store of another.
"""

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from budget_recovery_dagster.adapters.nats.stream import BucketStream, StreamInfo
from budget_recovery_dagster.adapters.postgres import migrate
from budget_recovery_dagster.domain import (
    Evidence,
    Hour,
    Incident,
    Outcome,
    RecoveryState,
    Verdict,
)
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.errors import IncidentHeldError, PossibleLossError, StoreChangedError
from budget_recovery_dagster.services.restore import (
    Applied,
    NothingToDo,
    RestoreRequest,
    release_restore,
    restore_manually,
)
from tests import services
from tests.integration.own_store import OwnStore
from tests.integration.own_store import opened_store as opened_own_store
from tests.integration.recovery_harness import (
    ORDER,
    Harness,
    all_stored,
    opened_harness,
    outcome_of,
    spend_total,
    total_in,
)
from tests.integration.timeless_store import opened_store
from tests.nats_servers import AlternatingServers, Bucket, Stored
from tests.stream_descriptions import move_creation

HOUR = timedelta(hours=1)


@dataclass
class OtherStore:
    """A second gateway's store, with the same bucket, on a server of its own."""

    server: NatsServer
    bucket_name: str
    monkeypatch: pytest.MonkeyPatch

    def point_to(self, url: str) -> None:
        """Set the address of the store."""
        self.monkeypatch.setenv("BUDGET_RECOVERY_NATS_URL", url)

    def use(self) -> None:
        self.point_to(self.server.url)

    @contextmanager
    def bucket(self) -> Iterator[Bucket]:
        with Bucket.connected(self.server.url, self.bucket_name) as bucket:
            yield bucket

    def everything(self) -> dict[str, Stored]:
        with self.bucket() as bucket:
            return all_stored(bucket)

    def move_creation(self, by: timedelta) -> None:
        """Change the creation time of the store, as if it had been made at another time."""
        with self.bucket() as bucket:
            created: datetime = bucket.info().created
        self.server.stop()
        stream = f"KV_{self.bucket_name}"
        move_creation(self.server._data_dir, stream, created.replace(microsecond=5) + by)
        self.server.start()


@pytest.fixture
def other(
    server_dir: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OtherStore]:
    """Start the other store, with a counter of 500; it is two hours older than ours."""
    with NatsServer(server_dir / f"nats {uuid4().hex[:8]}") as server:
        other = OtherStore(server, bucket.name, monkeypatch)
        with other.bucket() as its_bucket:
            its_bucket.create()
            spend_total(its_bucket, "500")
        other.move_creation(-2 * HOUR)
        yield other


@pytest.fixture
def ours(configured: Bucket, database_url: str) -> Bucket:
    """Return our store with a counter of 10, checked and captured."""
    spend_total(configured, "10")
    with opened_harness(configured, database_url) as harness:
        harness.check()
        harness.capture()
        harness.check()
    return configured


@pytest.fixture
def empty_plane(empty_database_url: str) -> str:
    """Return the URL of the database of another installation."""
    migrate(empty_database_url)
    return empty_database_url


@pytest.fixture
def harness(ours: Bucket, database_url: str) -> Iterator[Harness]:
    with opened_harness(ours, database_url) as harness:
        yield harness


def held(harness: Harness, evidence: Evidence) -> Incident:
    """Check; require an incident on hold because of another store."""
    incident = harness.find_held(
        Verdict.OTHER_STORE,
        "correct it",
        "`budget-recovery release`",
        "`budget-recovery resolve --keep-snapshots`",
        "--record-resets instead only if",
    )
    assert incident.losses[-1].evidence is evidence
    return incident


def test_a_wrong_address_and_back_changes_neither_store(
    harness: Harness, other: OtherStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = all_stored(harness.bucket), other.everything()
    our_url = services.present_settings().require_nats_url()
    other.use()
    incident = held(harness, Evidence.PREDATES)
    for _ in range(2):
        assert harness.check().check.verdict is Verdict.OTHER_STORE
    assert len(harness.open_incident.losses) == 1
    assert isinstance(harness.run(), NothingToDo)
    assert other.everything() == theirs

    other.point_to(our_url)
    for number in (1, 2, 3):
        checked = harness.check()
        assert checked.check.verdict is Verdict.SAME
        assert checked.recovery.state is (
            RecoveryState.HEALTHY if number == 3 else RecoveryState.RECOVERING
        )
    (closed,) = harness.plane.incidents.recent(1)
    assert closed.incident_id == incident.incident_id
    assert outcome_of(closed) is Outcome.RETURNED
    assert all_stored(harness.bucket) == ours
    assert harness.check().check.verdict is Verdict.SAME
    harness.clock.time += HOUR
    harness.capture()


def test_only_checks_in_a_row_that_see_the_accepted_store_count(
    harness: Harness, other: OtherStore
) -> None:
    our_url = services.present_settings().require_nats_url()
    other.use()
    held(harness, Evidence.PREDATES)
    for url in (our_url, our_url, other.server.url, our_url, our_url):
        other.point_to(url)
        assert harness.check().recovery.state is RecoveryState.RECOVERING
    assert harness.check().recovery.state is RecoveryState.HEALTHY


# It has half a minute: a store that was made later is recognized by its age.
@pytest.mark.alone
def test_a_store_with_a_marker_of_another_installation_is_another_one(
    ours: Bucket, other: OtherStore, database_url: str, empty_plane: str
) -> None:
    """It is too young to be recognized by its age."""
    other.move_creation(2 * HOUR - timedelta(seconds=30))
    our_url = services.present_settings().require_nats_url()
    other.use()
    with other.bucket() as its_bucket, opened_harness(its_bucket, empty_plane) as its_own:
        assert its_own.check().check.verdict is Verdict.FIRST_SEEN
    with opened_harness(ours, database_url) as harness:
        held(harness, Evidence.FOREIGN_MARKER)
        other.point_to(our_url)
        for _ in range(3):
            checked = harness.check()
        assert checked.recovery.state is RecoveryState.HEALTHY


def test_a_release_restores_into_the_store_that_replaces_ours(
    harness: Harness, other: OtherStore
) -> None:
    with other.bucket() as its_bucket:
        spend_total(its_bucket, "3")
    other.use()
    held(harness, Evidence.PREDATES)
    release_restore(harness.plane, by="alice@ops")
    assert outcome_of(harness.recover()) is Outcome.RESTORED
    with other.bucket() as its_bucket:
        assert total_in(its_bucket) == "10"
    assert harness.check().check.verdict is Verdict.SAME


def test_resolve_accepts_the_store_that_replaces_ours(harness: Harness, other: OtherStore) -> None:
    our_url = services.present_settings().require_nats_url()
    with other.bucket() as its_bucket:
        spend_total(its_bucket, "3")
    other.use()
    held(harness, Evidence.PREDATES)
    harness.resolve()
    with other.bucket() as its_bucket:
        assert total_in(its_bucket) == "3"
    assert harness.check().check.verdict is Verdict.SAME
    # Now the former store is another one, by its creation time alone.
    other.point_to(our_url)
    held(harness, Evidence.FORMER_STORE)
    assert total_in(harness.bucket) == "10"


@pytest.mark.parametrize("is_gone", [True, False])
def test_another_store_within_an_incident_puts_it_on_hold(
    harness: Harness,
    other: OtherStore,
    is_gone: bool,  # noqa: FBT001 - a parameter of pytest's
) -> None:
    harness.bucket.destroy()
    if not is_gone:
        harness.bucket.create()
    assert harness.find_loss() is Verdict.LOST
    theirs = other.everything()
    other.use()
    assert isinstance(harness.run(), NothingToDo)
    incident = harness.open_incident
    assert incident.losses[-1].verdict is Verdict.OTHER_STORE
    assert incident.on_hold is not None
    assert incident.attempts == 0
    assert other.everything() == theirs
    held(harness, Evidence.PREDATES)


def restore(harness: Harness) -> Applied:
    return restore_manually(
        harness.plane, opened_store, RestoreRequest(), ORDER, convergence_timeout=HOUR
    )


@pytest.mark.parametrize("end", [Harness.resolve, restore])
def test_a_manual_end_at_a_wrong_address_changes_neither_store_nor_baseline(
    harness: Harness, other: OtherStore, end: Callable[[Harness], object]
) -> None:
    harness.lose()
    assert harness.find_loss() is Verdict.LOST
    theirs, accepted = other.everything(), harness.plane.registry.claim().baseline
    other.use()
    with pytest.raises(IncidentHeldError, match="another store"):
        end(harness)
    assert harness.open_incident.losses[-1].evidence is Evidence.PREDATES
    assert other.everything() == theirs
    assert harness.plane.registry.claim().baseline == accepted


def test_servers_that_take_turns_open_one_incident_and_change_neither_store(
    harness: Harness, other: OtherStore
) -> None:
    theirs = other.everything()
    our_url = services.present_settings().require_nats_url()
    with AlternatingServers(other.server.url, our_url) as network:
        other.point_to(network.url)
        for _ in range(9):
            harness.check()
        assert isinstance(harness.run(), NothingToDo)
    incident = harness.open_incident
    assert incident.losses[0].verdict is Verdict.OTHER_STORE
    assert len(harness.plane.incidents.recent(9)) == 1
    assert other.everything() == theirs
    assert total_in(harness.bucket) == "10"
    other.point_to(our_url)
    for _ in range(3):
        harness.check()
    assert harness.check().recovery.state is RecoveryState.HEALTHY


@pytest.mark.parametrize("is_theirs_first", [True, False])
def test_a_new_store_that_takes_turns_with_the_accepted_one_is_no_loss(
    harness: Harness,
    other: OtherStore,
    is_theirs_first: bool,  # noqa: FBT001 - a parameter of pytest's
) -> None:
    # As new as a store that was made after a loss: alone it would be one.
    other.move_creation(2 * HOUR)
    theirs = other.everything()
    our_url = services.present_settings().require_nats_url()
    turns = [other.server.url, our_url]
    with AlternatingServers(*turns if is_theirs_first else reversed(turns)) as network:
        other.point_to(network.url)
        found = [harness.check().check.verdict for _ in range(9)]
    assert set(found) <= {Verdict.SAME, Verdict.UNKNOWN}
    assert Verdict.UNKNOWN in found
    assert harness.plane.incidents.recent(9) == ()
    assert other.everything() == theirs
    assert total_in(harness.bucket) == "10"
    other.use()
    assert harness.find_loss() is Verdict.LOST


@pytest.mark.parametrize("by", ["check", "capture"])
def test_a_first_installation_accepts_none_of_servers_that_take_turns(
    configured: Bucket, other: OtherStore, database_url: str, by: str
) -> None:
    spend_total(configured, "10")
    theirs = other.everything()
    our_url = services.present_settings().require_nats_url()
    with (
        AlternatingServers(other.server.url, our_url) as network,
        opened_harness(configured, database_url) as harness,
    ):
        other.point_to(network.url)
        if by == "check":
            assert harness.check().check.verdict is Verdict.UNKNOWN
        else:
            with pytest.raises(PossibleLossError, match="disagree"):
                harness.capture()
        record = harness.plane.registry.claim()
        assert record.baseline is None
        assert harness.plane.snapshots.tenants() == frozenset()
    assert other.everything() == theirs


def test_a_capture_that_reconnects_to_another_server_stores_nothing_of_it(
    harness: Harness, other: OtherStore
) -> None:
    our_url = services.present_settings().require_nats_url()
    with AlternatingServers(our_url, *[other.server.url] * 9) as network:
        other.point_to(network.url)
        # The connection breaks after the comparison, before the tenants are read.
        network.before_request = lambda number: network.cut() if number == 1 else None
        harness.clock.time += HOUR
        captured = services.capture(
            harness.plane,
            Hour.containing(harness.clock.time),
            open_store=opened_store,
        )
    assert getattr(captured, "stored", ()) == ()
    point = harness.plane.points.current_usages("acme", harness.clock.time)
    assert [str(usage) for each in point.values() for usage in each.values()] == ["10"]


def test_an_observation_that_reconnects_has_not_the_marker_of_another_server(
    harness: Harness, other: OtherStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    our_url = services.present_settings().require_nats_url()
    deployment_id = harness.plane.registry.claim().deployment_id
    page = BucketStream.page

    async def page_and_disconnect(stream: BucketStream, prefix: str) -> StreamInfo:
        """The connection breaks after the identity was read, before the marker is."""
        info = await page(stream, prefix)
        await stream.connection.close()
        return info

    monkeypatch.setattr(BucketStream, "page", page_and_disconnect)
    with AlternatingServers(our_url, other.server.url) as network:
        other.point_to(network.url)
        with opened_store() as store, pytest.raises(StoreChangedError, match="another store"):
            store.observe(deployment_id)


@pytest.mark.parametrize("turns_at", [b"usage.acme", b"usage.globex"])
@pytest.mark.parametrize("is_manual", [False, True], ids=["automatic", "manual"])
def test_a_restore_that_reconnects_to_another_server_writes_nothing_into_it(
    harness: Harness, other: OtherStore, turns_at: bytes, *, is_manual: bool
) -> None:
    for tenant in ("globex", "initech"):
        harness.bucket.spend(tenant, "total", "lifetime", {None: "10"})
    harness.capture(harness.clock.time + HOUR)
    harness.lose()
    harness.find_loss()
    theirs = other.everything()
    our_url = services.present_settings().require_nats_url()
    with AlternatingServers(our_url, *[other.server.url] * 9, watched=turns_at) as network:
        other.point_to(network.url)
        # The connection breaks at the first write of a counter of this tenant.
        network.before_request = lambda number: network.cut() if number == 1 else None
        if is_manual:
            applied = restore(harness)
            assert applied.failure is not None
        else:
            assert isinstance(harness.run(), NothingToDo)
    assert network.requests
    assert other.everything() == theirs

    other.point_to(our_url)
    harness.clock.time += HOUR
    harness.check()
    assert harness.open_incident.is_held
    release_restore(harness.plane, by="alice@ops")
    harness.recover()
    for tenant in ("acme", "globex", "initech"):
        assert harness.bucket.stored(f"usage.{tenant}.total.lifetime.=") is not None
    assert other.everything() == theirs


@pytest.fixture
def own_store(
    server_dir: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OwnStore]:
    directory = server_dir / f"own {uuid4().hex[:8]}"
    with opened_own_store(directory, database_url, monkeypatch) as store:
        store.do(Bucket.create)
        yield store
    shutil.rmtree(directory, ignore_errors=True)


def test_an_old_directory_and_back_again_ends_with_the_maximum_of_both_eras(
    own_store: OwnStore, database_url: str
) -> None:
    minutes = itertools.count(1)
    began_at = datetime.now(UTC)

    def harnessed(work: Callable[[Harness], object]) -> None:
        def run(bucket: Bucket) -> None:
            at = began_at + timedelta(minutes=next(minutes))
            with opened_harness(bucket, database_url, at) as harness:
                work(harness)

        own_store.do(run)

    def accept(harness: Harness) -> None:
        harness.check()
        harness.capture()
        harness.check()

    def restore(harness: Harness) -> None:
        assert harness.find_loss() is Verdict.LOST
        harness.recover()
        harness.capture()
        harness.check()

    own_store.spend("10")
    harnessed(accept)
    own_store.copy()
    # The first era goes on to 40.
    own_store.spend("40")
    harnessed(accept)
    keep_first_era = own_store._directory.with_name("first era")
    own_store.server.stop()
    shutil.copytree(own_store._directory, keep_first_era)
    own_store.server.start()
    # The second era begins with the old directory.
    own_store.set_back()
    harnessed(restore)
    assert own_store.do(total_in) == "40"
    own_store.spend("55")
    harnessed(Harness.capture)
    # Back to the first era.
    own_store.server.stop()
    shutil.rmtree(own_store._directory)
    shutil.copytree(keep_first_era, own_store._directory)
    own_store.server.start()
    harnessed(restore)
    assert own_store.do(total_in) == "55"
