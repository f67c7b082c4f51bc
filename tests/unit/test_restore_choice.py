"""The choice of snapshot, tenant and budget, and the errors if it does not exist."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budget_recovery_dagster.domain import (
    RestoreChoice,
    choose_budget,
    choose_snapshot,
    choose_tenant,
    tenant_text,
)
from budget_recovery_dagster.errors import ChoiceError

OLD = datetime(2026, 11, 28, 3, 0, 4, 120000, tzinfo=UTC)
EARLY = datetime(2026, 11, 30, 3, 0, 4, 123456, tzinfo=UTC)
LATER = datetime(2026, 11, 30, 3, 17, 9, 500000, tzinfo=UTC)
RETAINED = [OLD, LATER, EARLY]


@pytest.mark.parametrize("text", ["latest", " Latest "])
def test_latest_means_the_recovery_point(text: str) -> None:
    assert choose_snapshot(text, RETAINED) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-30T03:00:04.123456Z", EARLY),
        ("2026-11-30 03:00:04.123456 UTC", EARLY),
        ("2026-11-30 03:00:04", EARLY),
        ("2026-11-30T03:17", LATER),
        ("2026-11-28", OLD),
        ("2026-11-28-03:00", OLD),
        ("2026-11-28 03", OLD),
        ("2026-11-30T03:17:09.5Z", LATER),
    ],
)
def test_a_unique_prefix_selects_a_snapshot(text: str, expected: datetime) -> None:
    assert choose_snapshot(text, RETAINED) == expected


@pytest.mark.parametrize(
    ("text", "message", "choices"),
    [
        (
            "2026-11-30",
            "The snapshot '2026-11-30' is ambiguous: 2 snapshots match.",
            "choose the snapshot from: 2026-11-30T03:17:09.500000Z, 2026-11-30T03:00:04.123456Z.",
        ),
        (
            "2026-11-29 03:00",
            "No retained snapshot matches '2026-11-29 03:00'.",
            (
                "choose the snapshot from: latest, 2026-11-30T03:17:09.500000Z, "
                "2026-11-30T03:00:04.123456Z, 2026-11-28T03:00:04.120000Z."
            ),
        ),
        # A prefix must end between two parts of a timestamp.
        (
            "2026-11-30 03:1",
            "The snapshot '2026-11-30 03:1' is neither latest nor a timestamp in UTC.",
            "latest",
        ),
        (
            "2026-11-30T12:00:04.123456+09:00",
            (
                "The snapshot '2026-11-30T12:00:04.123456+09:00' is neither latest nor a "
                "timestamp in UTC."
            ),
            "latest",
        ),
        ("٢٠٢٦-11-30", "neither latest nor a timestamp in UTC.", "latest"),
        ("", "The snapshot '' is neither latest nor a timestamp in UTC.", "latest"),
    ],
)
def test_an_unknown_snapshot_is_refused_with_the_choices(
    text: str, message: str, choices: str
) -> None:
    with pytest.raises(ChoiceError) as refusal:
        choose_snapshot(text, RETAINED)
    assert message in refusal.value.message
    assert choices in refusal.value.hint


def test_the_newest_of_many_choices_are_listed() -> None:
    hours = [EARLY.replace(day=day, hour=hour) for day in (28, 29) for hour in range(24)]
    with pytest.raises(ChoiceError) as refusal:
        choose_snapshot("2026-12-01", hours)
    assert refusal.value.hint == (
        "choose the snapshot from: latest, "
        + ", ".join(f"2026-11-29T{hour:02d}:00:04.123456Z" for hour in range(23, 12, -1))
        + ", and 37 more."
    )


def test_tenants_and_budgets_are_chosen_by_name() -> None:
    assert choose_tenant("*", ["acme"]) is None
    assert choose_tenant("acme", ["acme"]) == "acme"
    assert choose_budget("", "acme", ["team"]) is None
    assert choose_budget("", None, []) is None
    assert choose_budget("team", "acme", ["team"]) == "team"


STRANGE = ["*", "=2A", "=3D2A", "=3D", "=", "*x", "=2Ax", "x*", "=2a", "acme", "=3D=2A", ">", " "]


def test_a_tenant_called_like_the_text_for_all_is_chosen_by_its_token() -> None:
    assert choose_tenant("*", STRANGE) is None
    assert choose_tenant("=2A", STRANGE) == "*"
    assert choose_tenant("=2A", ["*"]) == "*"
    with pytest.raises(ChoiceError) as refusal:
        choose_tenant("=2A", ["acme", "=2A"])
    assert refusal.value.message == "No snapshot of tenant '*' is retained."
    assert refusal.value.hint == "choose the tenant from: *, =3D2A, acme."


@given(st.one_of(st.sampled_from(STRANGE), st.text(min_size=1)))
def test_each_tenant_has_a_text_that_chooses_it_and_no_other(name: str) -> None:
    text = tenant_text(name)
    assert text != "*"
    assert choose_tenant(text, [*STRANGE, name]) == name
    # Other names are as they are.
    assert name in {text, "*"} or name.startswith("=")


def test_an_unknown_tenant_or_budget_is_refused_with_the_choices() -> None:
    with pytest.raises(ChoiceError) as refusal:
        choose_tenant("acmee", ["globex", "acme"])
    assert refusal.value.message == "No snapshot of tenant 'acmee' is retained."
    assert refusal.value.hint == "choose the tenant from: *, acme, globex."
    with pytest.raises(ChoiceError) as refusal:
        choose_budget("teem", "acme", ["team", "cards"])
    assert refusal.value.message == ("No snapshot of budget 'teem' of tenant 'acme' is retained.")
    assert refusal.value.hint == "choose the budget from: cards, team."
    with pytest.raises(
        ChoiceError, match="Budget 'team' needs a tenant, but the tenant is"
    ) as refusal:
        choose_budget("team", None, [])


def test_a_choice_describes_itself_and_a_budget_needs_a_tenant() -> None:
    assert str(RestoreChoice()) == "every tenant, highest usage in all snapshots"
    choice = RestoreChoice("acme", "team", OLD, despite_resets=True)
    assert str(choice) == (
        "budget 'team' of tenant 'acme', from the snapshot of 2026-11-28T03:00:04.120000Z, "
        "including reset usage"
    )
    with pytest.raises(ValueError, match="a budget needs its tenant"):
        RestoreChoice(budget="team")
