"""The state of a lease in PostgreSQL, and leases with a maximum duration."""

import logging
import time
from dataclasses import dataclass
from datetime import timedelta

import psycopg
import pytest

from budget_recovery_dagster.adapters.postgres import Database, PostgresLeases
from budget_recovery_dagster.domain import LeaseState
from budget_recovery_dagster.errors import LeaseLostError
from budget_recovery_dagster.stopwatch import HostClock
from tests.contract.control_planes import is_held
from tests.waiting import wait_until

SHORT = timedelta(seconds=1)
OFTEN = timedelta(seconds=0.05)
NEVER = timedelta(hours=1)


def test_reading_the_state_creates_no_row(database: Database, admin: psycopg.Connection) -> None:
    assert PostgresLeases(database).state_of("capture") == LeaseState(0, None)
    assert admin.execute("select from budget_recovery.lease").fetchall() == []


def test_reading_the_state_does_not_wait_for_a_lock(
    database: Database, admin: psycopg.Connection
) -> None:
    leases = PostgresLeases(database, renew_every=NEVER)
    with leases.hold("capture", "a") as lease, admin.transaction():
        admin.execute("select from budget_recovery.lease for update")
        # If it waited for the lock, it would time out.
        assert leases.state_of("capture") == LeaseState(lease.token, "a")


def test_an_expired_lease_has_no_holder(database: Database, admin: psycopg.Connection) -> None:
    leases = PostgresLeases(database, renew_every=NEVER)
    with leases.hold("capture", "stalled") as lease:
        admin.execute("update budget_recovery.lease set expires_at = clock_timestamp()")
        assert leases.state_of("capture") == LeaseState(lease.token, None)


def test_a_lease_is_renewed_until_its_maximum_duration_and_expires(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    at_most = timedelta(seconds=2)
    leases = PostgresLeases(database, duration=SHORT, renew_every=OFTEN)
    began = time.monotonic()
    with (
        caplog.at_level(logging.WARNING),
        leases.hold("restore", "hung", at_most=at_most) as lease,
    ):
        taken = time.monotonic()
        wait_until(lambda: not is_held(lease))
        lasted = time.monotonic()
        # It was renewed beyond its duration, but not far beyond its maximum duration.
        assert lasted - began >= at_most.total_seconds()
        assert lasted - taken <= (at_most + SHORT).total_seconds() + 1
        assert "The lease restore reached its maximum duration" in caplog.text
        wait_until(lambda: leases.state_of("restore") == LeaseState(lease.token, None))
        with leases.hold("restore", "next") as taken_over:
            assert taken_over.token > lease.token
            with pytest.raises(LeaseLostError):
                lease.require_held()


def test_a_lease_with_a_longer_maximum_duration_is_renewed(
    database: Database, admin: psycopg.Connection
) -> None:
    leases = PostgresLeases(database, duration=SHORT, renew_every=OFTEN)
    beyond = "select from budget_recovery.lease where expires_at > acquired_at + interval '2.5 s'"
    with leases.hold("restore", "busy", at_most=NEVER) as lease:
        wait_until(lambda: admin.execute(beyond).rowcount == 1)
        lease.require_held()


@dataclass
class SuspendableHost:
    """The clocks of a host: suspension stops only the monotonic one."""

    suspended: float = 0.0

    @property
    def clocks(self) -> list[HostClock]:
        return [time.monotonic, lambda: time.monotonic() + self.suspended]

    def suspend(self, seconds: float) -> None:
        self.suspended += seconds


def test_a_lease_has_expired_for_its_holder_after_the_host_was_suspended(
    database: Database,
) -> None:
    host = SuspendableHost()
    leases = PostgresLeases(database, renew_every=NEVER, host_clocks=host.clocks)
    with leases.hold("restore", "suspended") as lease:
        host.suspend(29)
        lease.require_held()
        host.suspend(1)
        with pytest.raises(LeaseLostError, match="could not be renewed in time"):
            lease.require_held()


def test_a_renewal_that_was_under_way_does_not_revive_a_lease(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    host = SuspendableHost()
    leases = PostgresLeases(database, renew_every=OFTEN, host_clocks=host.clocks)
    with leases.hold("restore", "suspended") as lease:
        host.suspend(31)
        assert not is_held(lease)
        # The server would still renew it: by its clock it has not expired.
        assert leases.state_of("restore").holder == "suspended"
        time.sleep(5 * OFTEN.total_seconds())
        assert not is_held(lease)


def test_a_host_clock_that_is_set_back_prolongs_no_lease(database: Database) -> None:
    host = SuspendableHost()
    leases = PostgresLeases(database, duration=SHORT, renew_every=NEVER, host_clocks=host.clocks)
    with leases.hold("restore", "slow") as lease:
        host.suspend(-3600)
        wait_until(lambda: not is_held(lease), seconds=10)
