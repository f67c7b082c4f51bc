from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budget_recovery_dagster.adapters.nats import (
    CounterKey,
    KeysRead,
    LiveKey,
    StoredValue,
    encode_key,
    read_boards,
    read_counters,
)
from budget_recovery_dagster.domain import (
    BOARD_SIZE,
    BudgetWindow,
    CaptureSource,
    CounterReading,
    Entity,
    OmittedCounter,
    TenantReading,
    UnlistedEntities,
    UnreadableKey,
    Window,
    format_usage,
)
from tests.boards import board, board_key, entries

KEY = "leaderboard.t.b.2026-11"
OF = BudgetWindow("b", Window.parse("2026-11"))


def found(values: dict[str, bytes], *, is_partial: bool = False) -> KeysRead:
    keys = {key: LiveKey(1, StoredValue(value, None, 0)) for key, value in values.items()}
    return KeysRead(keys, is_partial)


def reading(value: bytes) -> TenantReading:
    return read_boards("t", found({KEY: value}))


def usages(read: TenantReading) -> dict[Entity, Decimal]:
    return {counter.entity: counter.usage for counter in read.counters}


def test_a_board_is_read_exactly_without_shape_and_expiry() -> None:
    read = reading(
        b'{"entries":[{"entity":"user:alice@example.com","usage":"12.340"},'
        b'{"usage":0.000000000000000001,"entity":"bob","more":[1]}],"updated_at":"?"}'
    )
    assert read == TenantReading(
        tenant="t",
        source=CaptureSource.LEADERBOARDS,
        counters=(
            CounterReading(OF, "user:alice@example.com", Decimal("12.34"), None, None),
            CounterReading(OF, "bob", Decimal("1E-18"), None, None),
        ),
        omitted=(),
        unreadable=(),
        is_partial=False,
        unlisted=(),
        boards=frozenset({OF}),
    )


def test_a_null_entity_is_the_aggregate() -> None:
    read = reading(b'{"entries":[{"entity":null,"usage":99999999999999999999.5}]}')
    assert usages(read) == {None: Decimal("99999999999999999999.5")}
    assert read.unlisted == ()


def test_an_empty_board_has_no_unlisted_entities() -> None:
    read = reading(b'{"entries":[]}')
    assert (read.counters, read.omitted, read.unlisted) == ((), (), ())


@pytest.mark.parametrize(
    ("count", "unlisted"),
    [
        (499, ()),
        (500, (UnlistedEntities(OF, Decimal("0.5"), is_truncated=True),)),
        (501, (UnlistedEntities(OF, Decimal("0.5"), is_truncated=True),)),
    ],
)
def test_a_board_of_five_hundred_entries_may_be_truncated(
    count: int, unlisted: tuple[UnlistedEntities, ...]
) -> None:
    listed = [{"entity": f"e{number}", "usage": f"{number}.5"} for number in range(count)]
    read = reading(entries(*listed))
    assert len(read.counters) == count
    assert read.unlisted == unlisted


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "the value is not JSON"),
        (b"\xff\xfe", "the value is not UTF-8"),
        (b"[" * 100_000, "the value is nested too deeply"),
        (b"7", "the value is not an object"),
        (b"[]", "the value is not an object"),
        (b"null", "the value is not an object"),
        (b'"entries"', "the value is not an object"),
        (b"{}", "the value has no field entries"),
        (b'{"usage":"5"}', "the value has no field entries"),
        (b'{"entries":null}', "entries is not a list"),
        (b'{"entries":{"a":1}}', "entries is not a list"),
        (b'{"entries":"abc"}', "entries is not a list"),
    ],
)
def test_the_entities_of_an_unreadable_board_are_unknown(value: bytes, reason: str) -> None:
    read = reading(value)
    assert read.counters == ()
    assert read.omitted == (OmittedCounter(OF, None, KEY, reason, is_entity_known=False),)
    assert read.unlisted == (UnlistedEntities(OF, None, is_truncated=False),)


def test_a_board_with_unreadable_headers_is_omitted() -> None:
    value = StoredValue(board({"a": "1"}), None, 0, "the headers are unreadable")
    read = read_boards("t", KeysRead({KEY: LiveKey(1, value)}, is_partial=False))
    assert read.counters == ()
    assert [omission.reason for omission in read.omitted] == ["the headers are unreadable"]
    assert read.unlisted == (UnlistedEntities(OF, None, is_truncated=False),)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (b"5", "entry 2: not an object"),
        (b"null", "entry 2: not an object"),
        (b'["bob","5"]', "entry 2: not an object"),
        (b'{"usage":"5"}', "entry 2: no field entity"),
        (b'{"entity":7,"usage":"5"}', "entry 2: entity is neither a string nor null"),
        (b'{"entity":7.5,"usage":"5"}', "entry 2: entity is neither a string nor null"),
        (b'{"entity":true,"usage":"5"}', "entry 2: entity is neither a string nor null"),
        (b'{"entity":{"a":1},"usage":"5"}', "entry 2: entity is neither a string nor null"),
        (b'{"entity":"","usage":"5"}', "entry 2: an empty name"),
        (b'{"entity":"a\\u0000b","usage":"5"}', "entry 2: a name with a NUL character"),
        (b'{"entity":"a\\ud800","usage":"5"}', "entry 2: a name with half of a surrogate pair"),
    ],
)
def test_an_entry_without_a_valid_entity_is_omitted_and_does_not_affect_others(
    entry: bytes, reason: str
) -> None:
    read = reading(b'{"entries":[{"entity":"a","usage":"9"},%s,{"entity":"c","usage":3}]}' % entry)
    assert usages(read) == {"a": Decimal(9), "c": Decimal(3)}
    (omission,) = read.omitted
    assert (omission.of, omission.key) == (OF, KEY)
    assert reason in omission.reason
    assert not omission.is_entity_known
    assert read.unlisted == (UnlistedEntities(OF, None, is_truncated=False),)


@pytest.mark.parametrize(
    ("entry", "entity", "reason"),
    [
        (b'"entity":"bob"', "bob", "entry 2, 'bob': the value has no field usage"),
        (b'"entity":"bob","usage":null', "bob", "'bob': usage is neither a string nor a number"),
        (b'"entity":"bob","usage":NaN', "bob", "'bob': 'NaN' is not a decimal number"),
        (b'"entity":"bob","usage":"-5"', "bob", "'bob': -5 is negative"),
        (b'"entity":"bob","usage":1E400', "bob", "1E400 has more than 20 integer digits"),
        (b'"entity":"bob","usage":1e-19', "bob", "1e-19 has more than 18 decimals"),
        (b'"entity":null,"usage":"x"', None, "entry 2, the aggregate: 'x' is not a decimal"),
        ('"entity":"東","usage":"x"'.encode(), "東", r"entry 2, '\u6771': 'x' is not"),
        (b'"entity":"%s","usage":"x"' % (b"n" * 900), "n" * 900, "nnn...': 'x' is not a decimal"),
    ],
)
def test_an_unreadable_usage_is_omitted_with_its_entity(
    entry: bytes, entity: Entity, reason: str
) -> None:
    read = reading(
        b'{"entries":[{"entity":"a","usage":"9"},{%s},{"entity":"c","usage":3}]}' % entry
    )
    assert usages(read) == {"a": Decimal(9), "c": Decimal(3)}
    (omission,) = read.omitted
    assert (omission.of, omission.entity, omission.key) == (OF, entity, KEY)
    assert omission.is_entity_known
    assert reason in omission.reason
    assert omission.reason.isascii()
    assert omission.reason.isprintable()
    assert len(omission.reason) <= 200
    # All other entities are listed, so nothing else is unknown.
    assert read.unlisted == ()


def test_the_higher_usage_of_an_entity_listed_twice_counts() -> None:
    listed = [("a", "10"), ("b", "7"), ("a", "9"), ("b", "8"), (None, "1"), (None, "0")]
    read = reading(entries(*({"entity": name, "usage": usage} for name, usage in listed)))
    assert usages(read) == {"a": Decimal(10), "b": Decimal(8), None: Decimal(1)}
    assert read.omitted == ()


def test_the_lowest_usage_does_not_depend_on_the_order() -> None:
    twice = {"entity": "e1", "usage": "0.5"}
    others = [{"entity": f"e{number}", "usage": str(number)} for number in range(1, 500)]
    # e1 has 1, so an unlisted entity has at most 1.
    assert reading(entries(twice, *others)).unlisted == (
        UnlistedEntities(OF, Decimal(1), is_truncated=True),
    )


def test_a_full_board_with_an_unreadable_usage_has_the_lowest_readable_usage() -> None:
    listed = [{"entity": f"e{number}", "usage": str(number)} for number in range(2, 501)]
    read = reading(entries(*listed, {"entity": "e1", "usage": "?"}))
    assert read.unlisted == (UnlistedEntities(OF, Decimal(2), is_truncated=True),)
    nothing = reading(entries(*({"entity": f"e{number}", "usage": "?"} for number in range(500))))
    assert nothing.unlisted == (UnlistedEntities(OF, None, is_truncated=True),)
    assert len(nothing.omitted) == 500


def test_a_full_board_with_an_unknown_entity_has_no_lowest_usage() -> None:
    listed = [{"entity": f"e{number}", "usage": str(number)} for number in range(1, 500)]
    read = reading(entries(*listed, {"usage": "0"}))
    assert read.unlisted == (UnlistedEntities(OF, None, is_truncated=True),)


def test_an_unreadable_key_or_board_does_not_affect_others() -> None:
    read = read_boards(
        "t",
        found(
            {
                "leaderboard.t.b.2026-11": board({"a": "1"}),
                "leaderboard.t.b.2026-13": board({"a": "1"}),
                "leaderboard.t.b.2026-11.e": board({"a": "1"}),
                "leaderboard.t.b.lifetime": b"?",
                "leaderboard.t.c.lifetime": board({None: "2"}),
            },
            is_partial=True,
        ),
    )
    assert [(str(each.of), each.entity, each.usage) for each in read.counters] == [
        ("b 2026-11", "a", Decimal(1)),
        ("c lifetime", None, Decimal(2)),
    ]
    assert [(str(each.of), each.key) for each in read.omitted] == [
        ("b lifetime", "leaderboard.t.b.lifetime")
    ]
    assert read.unreadable == (
        UnreadableKey(
            "leaderboard.t.b.2026-11.e",
            "has 5 parts where a leaderboard's key has 4, leaderboard.tenant.budget.window",
        ),
        UnreadableKey("leaderboard.t.b.2026-13", "'2026-13' is not a window"),
    )
    assert read.is_partial


def test_a_name_too_long_for_a_counters_key_is_an_unknown_entity() -> None:
    # "usage.t.b.2026-11." has 18 bytes, and each @ takes three.
    longest = "@" * 327
    read = reading(board({longest: "5", "@" * 328: "5", "x" * 100_000: "4"}))
    assert usages(read) == {longest: Decimal(5)}
    assert [(each.is_entity_known, each.reason) for each in read.omitted] == [
        (False, "entry 2: a key of 1002 bytes, more than 1000"),
        (False, "entry 3: a key of 100018 bytes, more than 1000"),
    ]


entity_names = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20
)
amounts = st.decimals(0, 10**20 - 1, places=18, allow_nan=False, allow_infinity=False)


@given(st.dictionaries(st.none() | entity_names, amounts, max_size=BOARD_SIZE - 1))
def test_below_five_hundred_entities_both_sources_agree(
    held: dict[Entity, Decimal],
) -> None:
    written = {entity: format_usage(usage) for entity, usage in held.items()}
    counters = {
        encode_key(CounterKey("t", OF, entity)): b'{"usage":"%s"}' % usage.encode()
        for entity, usage in written.items()
    }
    by_counters = read_counters("t", found(counters))
    by_boards = read_boards("t", found({board_key("t", "b", "2026-11"): board(written)}))
    assert usages(by_boards) == usages(by_counters) == held
    assert len(by_boards.counters) == len(held)
    assert (by_boards.omitted, by_boards.unlisted) == ((), ())


@given(st.binary(max_size=80))
def test_any_bytes_of_a_board_can_be_read(value: bytes) -> None:
    reading(value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["entity", "usage", "entries"]), inner, max_size=3)
    ),
    max_leaves=20,
)


@given(st.lists(json_values, max_size=6))
def test_any_entries_can_be_read_and_all_are_accounted_for(
    listed: list[object],
) -> None:
    read = reading(entries(*listed))
    assert len(read.counters) + len(read.omitted) <= len(listed)
    assert bool(listed) == bool(read.counters or read.omitted)
    assert all(omission.reason.isascii() for omission in read.omitted)
