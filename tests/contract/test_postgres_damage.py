"""The verification of a stored snapshot reports any damage and never fails itself."""

import threading
from datetime import timedelta
from decimal import Decimal

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from budget_recovery_dagster.domain import Damage, Hour, Usages, hash_usages, parse_usage
from budget_recovery_dagster.errors import DatabaseError
from tests.contract.control_planes import NOON, ControlPlane, Counters, of, point_of

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
TEAM: Counters = {("team", "lifetime"): {"alice": "1"}}
OTHER_USAGES = "budget 'team', window lifetime: usages differ from the capture (checksum mismatch)"


@pytest.fixture
def plane(postgres_plane: ControlPlane) -> ControlPlane:
    return postgres_plane


# Constraints of the tables prevent some damage, but a disk may contain anything.
UNCHECKED = (
    "alter table budget_recovery.budget_content"
    " drop constraint content_lists_are_flat, drop constraint content_lists_are_of_one_length,"
    " drop constraint content_has_no_null, drop constraint content_usages_are_in_bounds;"
)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            "update budget_recovery.budget_content set usages[1] = 2",
            OTHER_USAGES,
        ),
        (
            "update budget_recovery.budget_content set entities[1] = 'mallory'",
            OTHER_USAGES,
        ),
        (
            "update budget_recovery.budget_content set entities = '{a,a}', usages = '{1,1}'",
            "2 counters are stored, but 1 were captured",
        ),
        (f"{UNCHECKED} update budget_recovery.budget_content set usages = '{{1,2}}'", OTHER_USAGES),
        (f"{UNCHECKED} update budget_recovery.budget_content set entities = '{{}}'", OTHER_USAGES),
        (
            f"{UNCHECKED} update budget_recovery.budget_content set usages = '{{NULL}}'",
            OTHER_USAGES,
        ),
        (
            f"{UNCHECKED} update budget_recovery.budget_content set entities = '{{NULL}}'",
            OTHER_USAGES,
        ),
        (f"{UNCHECKED} update budget_recovery.budget_content set usages = '{{NaN}}'", OTHER_USAGES),
        (
            (
                f"{UNCHECKED} update budget_recovery.budget_content"
                " set entities = '{{a,b},{c,d}}', usages = '{{1,2},{3,4}}'"
            ),
            OTHER_USAGES,
        ),
        (
            "update budget_recovery.budget_content set content_hash = sha256(content_hash)",
            OTHER_USAGES,
        ),
        (
            (
                "update budget_recovery.budget_record set window_token = '2026-11',"
                " window_start = '2026-11-01T00:00Z', window_end = 'infinity'"
            ),
            "budget 'team', window 2026-11: stored with the start or end of another window",
        ),
        (
            (
                "update budget_recovery.budget_record set window_token = '2026-13',"
                " window_start = '2026-11-01T00:00Z', window_end = '2026-12-01T00:00Z'"
            ),
            "budget 'team', window 2026-13: not a window of the calendar",
        ),
        (
            "delete from budget_recovery.budget_record",
            "0 records are stored, but 1 were captured",
        ),
        (
            "update budget_recovery.capture set omitted_count = 1",
            "0 omitted counters are stored, but 1 were captured",
        ),
        (
            (
                "update budget_recovery.budget_record set window_token = '2026-11',"
                " window_start = '2026-11-02T00:00Z', window_end = '2026-12-01T00:00Z'"
            ),
            "budget 'team', window 2026-11: stored with the start or end of another window",
        ),
    ],
)
def test_damage_is_described_in_a_sentence(
    plane: ControlPlane, admin: psycopg.Connection, damage: str, sentence: str
) -> None:
    plane.capture("acme", TEAM)
    plane.capture("acme", {("team", "lifetime"): {"alice": "3"}}, at=NOON + HOUR)
    assert plane.reports.damaged_in(Hour(NOON)) == ()
    admin.execute(damage.encode())
    damaged = plane.reports.damaged_in(Hour(NOON))
    assert f"tenant 'acme', 2026-11-25 12:00:00 UTC: {sentence}." in damaged
    assert plane.reports.damaged_in(Hour(NOON + 2 * HOUR)) == ()


def test_a_missing_content_is_a_damaged_record(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    plane.capture("acme", TEAM)
    admin.execute(
        "alter table budget_recovery.budget_record drop constraint"
        " budget_record_content_id_fkey; delete from budget_recovery.budget_content"
    )
    (window,) = plane.current_windows("acme")
    assert (window.usages, window.corrupt) == ({}, (NOON,))
    with plane.snapshots.records_of("acme", Hour(NOON)) as records:
        assert records is not None
        with pytest.raises(
            DatabaseError, match=r"tenant 'acme', 2026-11-25 12:00:00 UTC, .*team"
        ) as raised:
            list(records)
    assert raised.value.hint.startswith("capture the current hour; ")


def test_an_error_about_a_damaged_record_does_not_lock_the_connection(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    plane.capture("acme", TEAM)
    admin.execute("update budget_recovery.budget_content set usages = '{2}'")
    errors: list[DatabaseError] = []

    def read() -> None:
        with plane.snapshots.records_of("acme", Hour(NOON)) as records:
            assert records is not None
            try:
                list(records)
            except DatabaseError as error:
                # Its traceback keeps the frames of the reader.
                errors.append(error)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(30)
    assert not reading.is_alive()
    assert len(errors) == 1


def test_a_record_does_not_cover_a_damaged_one(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    plane.capture("acme", {("team", "lifetime"): {"alice": "8"}})
    plane.capture("acme", {("team", "lifetime"): {"alice": "9"}}, at=NOON + HOUR)
    # The newest record, which covers the one before, now has a lower usage.
    admin.execute("update budget_recovery.budget_content set usages = '{1}' where usages = '{9}'")

    plane.capture("acme", {("team", "lifetime"): {"alice": "2"}}, at=NOON + 2 * HOUR)

    # 8 is the highest intact usage. If the new record covered it, the 2 would hide it.
    assert plane.points.current_usages("acme", NOON + 2 * HOUR) == point_of(
        {("team", "lifetime"): {"alice": "8"}}
    )
    point = plane.points.point_of("acme", NOON + 2 * HOUR)
    assert point is not None
    assert point.windows[0].usages == {"alice": Decimal(8)}


@pytest.mark.parametrize(
    "damage",
    [
        "usages[1] = 2",
        "usages[1] = 1.0",
        "entities[1] = 'mallory'",
        "entities[1] = ''",
        "entities = '{a,a}', usages = '{1,1}'",
        "entities = '{alice,NULL}', usages = '{1,NULL}'",
        "entities = '{alice,NULL}', usages = '{1,2}'",
        "usages = '{1,2}'",
        "usages = '{NULL}'",
        "entities = '{}'",
        "entities = '{}', usages = '{}'",
        "entities = '{NULL}'",
        "usages = '{NaN}'",
        "usages = '{Infinity}'",
        "usages = '{{1}}', entities = '{{alice}}'",
        "content_hash = sha256(content_hash)",
    ],
)
def test_the_database_finds_the_same_damage_as_every_reader(
    plane: ControlPlane, admin: psycopg.Connection, damage: str
) -> None:
    plane.capture("acme", TEAM)
    plane.capture("intact", {("team", "lifetime"): {"alice": "3"}})
    assert admin.execute("select from budget_recovery.damaged_record").fetchall() == []
    update = (
        f"{UNCHECKED} update budget_recovery.budget_content set {damage} where usages = '{{1}}'"
    )
    admin.execute(update.encode())
    assert plane.current_windows("acme")[0].corrupt == (NOON,)
    assert admin.execute("select * from budget_recovery.damaged_record").fetchall() == [
        ("acme", NOON, "team", "lifetime", 1)
    ]
    assert plane.points.damaged(NOON).records == {"acme": 1}
    assert plane.points.newest_points(NOON) == {"intact": NOON}


def test_pruning_keeps_what_an_open_window_with_a_wrong_end_needs(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    quarter = ("team", "2026-Q4")
    plane.capture("acme", {quarter: {"alice": "1", "bob": "5"}}, at=NOON)
    plane.capture("acme", {quarter: {"alice": "2"}}, at=NOON + 8 * DAY)
    admin.execute("update budget_recovery.budget_record set window_end = '2026-11-26T00:00Z'")
    assert plane.prune("acme").records == 0
    usages = plane.points.current_usages("acme", plane.clock.now())
    assert usages == point_of({quarter: {"alice": "2", "bob": "5"}})


def test_pruning_keeps_records_whose_stored_window_seems_open(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    november = ("team", "2026-11")
    plane.capture("acme", {november: {"alice": "1", "bob": "5"}}, at=NOON)
    plane.capture("acme", {november: {"alice": "2"}}, at=NOON + HOUR)
    admin.execute("update budget_recovery.budget_record set window_end = '2027-01-01T00:00Z'")
    plane.clock.set(NOON + 20 * DAY)
    # The stored end may be right, and the token damaged.
    assert plane.prune("acme").records == 0


# Like the function of the schema, but the newest content takes until another session ends.
_SLOW = """
create or replace function budget_recovery.is_stored_intact(content_id bigint) returns boolean
language plpgsql as $$
begin
    if is_stored_intact.content_id = (select max(c.content_id)
       from budget_recovery.budget_content c) then
        perform pg_advisory_xact_lock_shared(1);
    end if;
    return (
        select budget_recovery.content_is_intact(c.content_hash, c.entities, c.usages)
        from budget_recovery.budget_content c
        where c.content_id = is_stored_intact.content_id
    );
end $$;
select pg_advisory_lock(1);
"""


def test_a_slow_tenant_does_not_hide_what_is_known_of_the_others(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    budgets = [f"budget {each}" for each in range(250)]
    for order, tenant in enumerate("abcd", start=1):
        counters = {
            (budget, "lifetime"): {None: f"{order}.{each + 1}"}
            for each, budget in enumerate(budgets)
        }
        plane.capture(tenant, counters, at=NOON)
    plane.corrupt("a", NOON, of("budget 1", "lifetime"))
    assert plane.points.damaged(NOON, within=timedelta(minutes=1)) == Damage({"a": 1})
    admin.execute(_SLOW)
    # Nothing more than the newest content of d was slow; but a may have more damaged records.
    assert plane.points.damaged(NOON, within=timedelta(seconds=2)) == Damage({"a": 1}, ("a", "d"))
    assert plane.points.damaged(NOON, tenant="b", within=timedelta(seconds=2)) == Damage({})


def test_a_locked_table_does_not_delay_a_verification_with_a_time_limit(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    plane.capture("acme", TEAM)
    with admin.transaction():
        admin.execute("lock table budget_recovery.budget_content in access exclusive mode")
        found = plane.points.damaged(NOON, within=timedelta(seconds=0.5))
    assert found == Damage({}, ("acme",))
    assert plane.points.damaged(NOON) == Damage({})


def test_the_database_lists_records_whose_content_is_missing(
    plane: ControlPlane, admin: psycopg.Connection
) -> None:
    plane.capture("acme", TEAM)
    admin.execute(
        "alter table budget_recovery.budget_record drop constraint"
        " budget_record_content_id_fkey; delete from budget_recovery.budget_content"
    )
    assert admin.execute("select tenant from budget_recovery.damaged_record").fetchall() == [
        ("acme",)
    ]
    assert plane.points.damaged(NOON).records == {"acme": 1}


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
contents = st.dictionaries(
    st.none() | names,
    st.integers(0, 10**38 - 1).map(
        lambda number: parse_usage(f"{number // 10**18}.{number % 10**18:018d}")
    ),
    max_size=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(usages=contents)
@example(usages={None: Decimal("1E+5"), "a": Decimal(0), "b": parse_usage("0." + 17 * "0" + "1")})
@example(
    usages={
        "\U0001f980": Decimal(1),
        "\uffff": Decimal(2),
        "\u007f": Decimal(3),
        "e\u0301": Decimal(4),
    }
)
def test_the_database_verifies_the_same_bytes(admin: psycopg.Connection, usages: Usages) -> None:
    entities = [entity or "" for entity in usages]
    content = (hash_usages(usages), entities, list(usages.values()))
    intact = "select budget_recovery.content_is_intact(%s, %s::text[], %s::numeric[])"
    assert admin.execute(intact, content).fetchone() == (True,)
