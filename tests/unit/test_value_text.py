"""Replacing members of a JSON object preserves every other byte."""

import json
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budget_recovery_dagster.adapters.nats import replace_all, replace_members

SCALARS = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
VALUES = st.recursive(
    SCALARS, lambda each: st.lists(each) | st.dictionaries(st.text(), each), max_leaves=20
)
WRITERS = [json.dumps, partial(json.dumps, indent=2), partial(json.dumps, ensure_ascii=False)]
NAMES = st.sampled_from(["usage", "updated_at", "a"]) | st.text()


@pytest.mark.parametrize(
    ("text", "replaced"),
    [
        ('{"u":1}', '{"u":NEW}'),
        (' \n{ "u"\t:\r1 , "x": 2 } ', ' \n{ "u"\t:\rNEW , "x": 2 } '),
        ('{"x":{"u":1},"u":"}"}', '{"x":{"u":1},"u":NEW}'),
        ('{"u":"\\"u\\":1","x":[1,{"u":2}]}', '{"u":NEW,"x":[1,{"u":2}]}'),
        ('{"\\u0075":1}', '{"\\u0075":NEW}'),
        ('{"u":1,"u":2}', '{"u":1,"u":NEW}'),
        ('{"U":1}', '{"U":1}'),
        ("{}", "{}"),
        ("{ }", "{ }"),
        ('{"u":1e400,"n":' + "9" * 5000 + "}", '{"u":NEW,"n":' + "9" * 5000 + "}"),
        ('{"u":NaN,"x":-0.0}', '{"u":NEW,"x":-0.0}'),
    ],
)
def test_only_top_level_members_are_replaced(text: str, replaced: str) -> None:
    assert replace_members(text, {"u": "NEW"}, {}) == replaced


def test_several_members_of_any_order_and_length_are_replaced_at_once() -> None:
    text = '{"b":"1","x":0,"a":2}'
    assert replace_members(text, {"a": "longer", "c": "-"}, {"b": "even longer"}) == (
        '{"b":even longer,"x":0,"a":longer}'
    )


@given(st.dictionaries(NAMES, VALUES), VALUES, st.sampled_from(WRITERS))
def test_a_replacement_changes_no_other_member(
    content: dict[str, object], value: object, write: Callable[[object], str]
) -> None:
    replaced = json.loads(replace_members(write(content), {"usage": json.dumps(value)}, {}))
    expected = {**content, "usage": value} if "usage" in content else content
    assert replaced == expected


@pytest.mark.parametrize(
    ("text", "replaced"),
    [
        ('{"u":"x","n":1}', '{"u":NEW,"n":1}'),
        ('{"u":7}', '{"u":7}'),
        ('{"u":"x","u":null}', '{"u":"x","u":null}'),
        ("{}", "{}"),
    ],
)
def test_string_replacements_apply_only_to_strings(text: str, replaced: str) -> None:
    assert replace_members(text, {}, {"u": "NEW"}) == replaced


def test_the_white_space_around_a_whole_value_stays() -> None:
    assert replace_all(" \n1.0\t", "2") == " \n2\t"
    assert replace_all("1", "11") == "11"
