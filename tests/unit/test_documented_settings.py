"""The table of settings in docs/operations.md matches the settings."""

import re
from pathlib import Path

from budget_recovery_dagster.settings import PREFIX, Settings
from tests.documentation import code, rows

PAGE = "docs/operations.md"
PROJECT = Path(__file__).parents[2]
DOCUMENTED = {
    code(name): (default, bounds)
    for name, default, bounds, _ in rows(PAGE, "setting", "default", "range", "meaning")
}


def test_the_table_lists_exactly_the_settings() -> None:
    assert list(DOCUMENTED) == [PREFIX + field.upper() for field in Settings.model_fields]


def test_each_default_is_documented() -> None:
    for field, info in Settings.model_fields.items():
        default, _ = DOCUMENTED[PREFIX + field.upper()]
        if info.default is None:
            # The defaults of the two directories are described in words.
            assert not default.startswith("`") or field == "tables_dir"
        else:
            assert code(default) == str(info.default)


def test_each_documented_range_is_the_one_in_the_error_message() -> None:
    for field, info in Settings.model_fields.items():
        if info.description is None:
            continue
        _, bounds = DOCUMENTED[PREFIX + field.upper()]
        assert bounds in info.description
        # The page shows both ends of a numeric range.
        if numbers := re.findall(r"\d+", info.description):
            assert re.findall(r"\d+", bounds) == numbers
