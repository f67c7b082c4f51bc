"""What Dagster's page of a preview shows without a click."""

from budget_recovery_dagster.presentation.restore_metadata import preview_metadata
from tests.unit.manual_harness import captured_manual_harness

# The page shows longer texts only as a link.
SHOWN_AT_ONCE = 999

# A browser counts it as two characters.
PIZZA = "\N{SLICE OF PIZZA}"


def test_the_chart_of_largest_changes_fits_on_the_page() -> None:
    harness = captured_manual_harness()
    for number in range(20):
        harness.spend(PIZZA * 20, str(200 + number), f"user {number}")
    harness.capture()
    harness.wipe()
    picture = preview_metadata(harness.preview(), [])["largest_changes"].value
    assert len(picture.encode("utf-16-le")) / 2 <= SHOWN_AT_ONCE
    drawn = [line for line in picture.splitlines() if line.startswith("  [")]
    assert len(drawn) > 5
    assert drawn[0].endswith("nothing -> 219")
    assert picture.endswith("\n```")


def test_a_single_change_is_drawn_even_if_it_is_too_long() -> None:
    harness = captured_manual_harness()
    harness.spend("a", "200", "x" * 950)
    harness.capture()
    harness.wipe()
    picture = preview_metadata(harness.preview(), [])["largest_changes"].value
    assert len(picture) > SHOWN_AT_ONCE
    assert picture.count("->") == 1


def test_a_preview_shows_how_to_apply_it_if_that_changes_something() -> None:
    harness = captured_manual_harness()
    assert "to_apply" not in preview_metadata(harness.preview(), [])
    harness.spend("a", "20")
    assert "to_apply" in preview_metadata(harness.preview(), [])
    harness.spend("a", "80")
    harness.fail()
    harness.spend("a", "80")
    harness.spend("a", "30", "alice")
    harness.spend("b", "5")
    # A restore raises nothing, but closes the incident.
    assert "to_apply" in preview_metadata(harness.preview(), [])
