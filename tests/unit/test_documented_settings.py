"""The table of settings in docs/operations.md is that of the settings."""

import re
from pathlib import Path

from budget_recovery_dagster.settings import PREFIX, Settings
from tests.documentation import code, rows

PAGE = "docs/operations.md"
PROJECT = Path(__file__).parents[2]
TOLD = {
    code(name): (default, bounds)
    for name, default, bounds, _ in rows(PAGE, "setting", "default", "range", "meaning")
}


def test_every_setting_is_in_the_table_and_no_other() -> None:
    assert list(TOLD) == [PREFIX + field.upper() for field in Settings.model_fields]


def test_each_default_is_the_one_that_is_told() -> None:
    for field, info in Settings.model_fields.items():
        default, _ = TOLD[PREFIX + field.upper()]
        if info.default is None:
            # Of the two directories it is told in words.
            assert not default.startswith("`") or field == "tables_dir"
        else:
            assert code(default) == str(info.default)


def test_each_range_is_the_one_with_which_a_wrong_value_is_refused() -> None:
    for field, info in Settings.model_fields.items():
        if info.description is None:
            continue
        _, bounds = TOLD[PREFIX + field.upper()]
        assert bounds in info.description
        # Of a range of numbers both ends are told.
        if numbers := re.findall(r"\d+", info.description):
            assert re.findall(r"\d+", bounds) == numbers
