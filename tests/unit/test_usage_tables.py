"""Hourly tables as real files, with an in-memory control plane."""

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from budget_recovery_dagster.adapters.parquet import ParquetTables, directory_of
from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.errors import HourNotCapturedError
from budget_recovery_dagster.services import TableFailed, TablesBuilt, build_tables
from tests.contract.control_planes import NOON, ControlPlane, Counters, in_memory
from tests.fakes.snapshots import MemorySnapshots

TEAM: Counters = {("team", "lifetime"): {"alice": "1.5", None: "7"}}
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


class Scene:
    """A control plane and the directory of its tables."""

    def __init__(self, place: Path) -> None:
        self.plane: ControlPlane = in_memory()
        self.place = place
        self.failures: list[TableFailed] = []

    def build(self, at: datetime) -> TablesBuilt:
        return build_tables(
            self.plane,
            ParquetTables(self.place),
            Hour.containing(at),
            on_failure=self.failures.append,
        )

    def files(self, tenant: str) -> list[str]:
        return sorted(path.name for path in (self.place / directory_of(tenant)).glob("*"))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "tables")


def test_each_tenant_of_the_hour_gets_a_table(scene: Scene) -> None:
    scene.plane.capture("acme", TEAM, at=NOON)
    scene.plane.capture("other", {**TEAM, ("team", "2026-11"): {"bo": "1"}}, at=NOON)
    scene.plane.capture("later", TEAM, at=NOON + HOUR)
    built = scene.build(NOON)
    assert [(each.tenant, each.file.rows) for each in built.written] == [("acme", 2), ("other", 3)]
    assert (built.rows, built.failed, built.pruned.removed) == (5, (), 0)
    assert built.size == sum(path.stat().st_size for path in scene.place.glob("*/*.parquet"))
    assert scene.files("acme") == ["2026-11-25T12Z.parquet"]
    assert scene.files("later") == []


def test_the_table_of_an_hour_contains_both_of_its_captures(scene: Scene) -> None:
    scene.plane.capture("acme", TEAM, at=NOON)
    scene.build(NOON)
    again = NOON + timedelta(minutes=30)
    scene.plane.capture("acme", TEAM, at=again)
    (written,) = scene.build(NOON).written
    times = pq.read_table(written.file.path)["captured_at"].to_pylist()
    assert times == [NOON, NOON, again, again]


def test_the_table_of_a_past_hour_is_reproducible(scene: Scene) -> None:
    scene.plane.capture("acme", TEAM, at=NOON)
    path = Path(scene.build(NOON).written[0].file.path)
    before = path.read_bytes()
    path.unlink()
    scene.plane.capture("acme", {("team", "lifetime"): {"alice": "9"}}, at=NOON + DAY)
    scene.build(NOON)
    assert path.read_bytes() == before


def test_a_tenant_whose_table_fails_does_not_affect_others(scene: Scene) -> None:
    for tenant in ("a", "b", "c"):
        scene.plane.capture(tenant, TEAM, at=NOON)
    scene.place.mkdir()
    (scene.place / directory_of("b")).write_text("in the way")
    built = scene.build(NOON)
    assert [each.tenant for each in built.written] == ["a", "c"]
    (failed,) = built.failed
    assert failed.tenant == "b"
    assert "BUDGET_RECOVERY_TABLES_DIR" in failed.reason
    assert scene.failures == [failed]


def test_tables_are_removed_with_their_snapshots(scene: Scene) -> None:
    for tenant in ("acme", "spared"):
        scene.plane.capture(tenant, TEAM, at=NOON)
    scene.build(NOON)
    late = NOON + 7 * DAY + HOUR
    scene.plane.capture("acme", TEAM, at=late)
    scene.plane.prune("acme")
    assert scene.build(late).pruned.removed == 1
    assert scene.files("acme") == ["2026-12-02T13Z.parquet"]
    assert scene.files("spared") == ["2026-11-25T12Z.parquet"]


def test_a_snapshot_kept_only_for_the_recovery_point_has_no_table(scene: Scene) -> None:
    old: Counters = {("gone", "lifetime"): {"alice": "5"}, **TEAM}
    scene.plane.capture("acme", old, at=NOON)
    scene.build(NOON)
    late = NOON + 7 * DAY + HOUR
    scene.plane.capture("acme", TEAM, at=late)
    scene.plane.prune("acme")
    assert scene.plane.reports.captured_in(Hour(NOON)) != ()
    # Its table is removed although this hour is requested.
    with pytest.raises(HourNotCapturedError, match="past retention"):
        scene.build(NOON)
    assert scene.files("acme") == []


def test_an_hour_without_a_snapshot_is_refused_with_a_hint(scene: Scene) -> None:
    scene.plane.capture("acme", TEAM, at=NOON)
    with pytest.raises(HourNotCapturedError) as refused:
        scene.build(NOON - HOUR)
    assert refused.value.message.startswith("No table of the hour 2026-11-25-11:00 UTC")
    assert "2026-11-25-12:00" in refused.value.hint


def test_an_empty_snapshot_has_a_table_without_rows(scene: Scene) -> None:
    scene.plane.capture("acme", TEAM, at=NOON)
    scene.plane.capture("acme", {}, at=NOON + HOUR)
    with_rows, without = (scene.build(at).written[0].file for at in (NOON, NOON + HOUR))
    assert (with_rows.rows, without.rows) == (2, 0)
    assert pq.read_schema(without.path).equals(pq.read_schema(with_rows.path))


class LateListing(MemorySnapshots):
    """Also lists tenants whose snapshots of the hour have just been pruned."""

    def tenants_in(self, hour: Hour) -> tuple[str, ...]:
        return ("acme", *super().tenants_in(hour), "pruned")


def test_a_snapshot_pruned_after_the_listing_gets_no_table(scene: Scene) -> None:
    scene.plane.capture("other", TEAM, at=NOON)
    snapshots = scene.plane.snapshots
    assert isinstance(snapshots, MemorySnapshots)
    scene.plane = replace(scene.plane, snapshots=LateListing(snapshots._plane))
    built = scene.build(NOON)
    assert [each.tenant for each in built.written] == ["other"]
    assert scene.failures == []
    with pytest.raises(HourNotCapturedError):
        scene.build(NOON - HOUR)
