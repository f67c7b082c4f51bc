import re
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budget_recovery_dagster.adapters.parquet import (
    DIRECTORY_NAME,
    TABLE_NAME,
    UNFINISHED_NAME,
    directory_of,
    table_of,
    unfinished,
)
from budget_recovery_dagster.domain import Hour

HOUR = Hour(datetime(2026, 11, 29, 14, tzinfo=UTC))


@pytest.mark.parametrize(
    ("tenant", "readable"),
    [
        ("acme", "acme"),
        ("/etc/x", "etc-x"),
        ("../x", "x"),
        ("..", "tenant"),
        ("東京", "tenant"),
        ("a\nb", "a-b"),
        ("_hidden", "hidden"),
        (".hidden", "hidden"),
        ("x" * 600, "x" * 40),
        ("a=1", "a-1"),  # readers interpret name=value as a partition
    ],
)
def test_a_directory_name_starts_with_the_readable_part_of_the_tenant(
    tenant: str, readable: str
) -> None:
    name = directory_of(tenant)
    assert re.fullmatch(rf"{readable}-[0-9a-f]{{24}}", name)
    assert DIRECTORY_NAME.fullmatch(name)


def test_the_digest_is_that_of_the_tenant_name() -> None:
    # The first 24 digits of the sha256sum of "acme".
    assert directory_of("acme") == "acme-822b33ad87c148a0a20a5ba7"


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_every_tenant_name_gives_one_plain_path_component(tenant: str) -> None:
    name = directory_of(tenant)
    assert re.fullmatch(r"[A-Za-z0-9-][A-Za-z0-9_-]*", name)
    assert len(name) <= 65
    assert DIRECTORY_NAME.fullmatch(name)


def test_a_table_is_named_after_its_hour() -> None:
    assert table_of(HOUR) == "2026-11-29T14Z.parquet"
    assert TABLE_NAME.fullmatch(table_of(HOUR))
    assert UNFINISHED_NAME.fullmatch(unfinished(table_of(HOUR)))


@pytest.mark.parametrize(
    "foreign",
    ["notes.parquet", "2026-11-29T14Z.parquet.bak", "2026-11-29T14Z_parquet", ".2026.unfinished"],
)
def test_other_file_names_are_ignored(foreign: str) -> None:
    assert not TABLE_NAME.fullmatch(foreign)
    assert not UNFINISHED_NAME.fullmatch(foreign)
    assert not DIRECTORY_NAME.fullmatch(foreign)
