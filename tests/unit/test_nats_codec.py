import string
from decimal import Decimal
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budget_recovery_dagster.adapters.nats import (
    BOARDS,
    COUNTERS,
    MAX_KEY_BYTES,
    BoardKey,
    CounterKey,
    KeysRead,
    LiveKey,
    StoredValue,
    UnreadableKeyError,
    decode_board_key,
    decode_entity,
    decode_key,
    decode_name,
    encode_board_key,
    encode_entity,
    encode_key,
    encode_name,
    list_tenants,
    prefix_to_read,
    printable,
    read_counters,
    tenant_prefix,
)
from budget_recovery_dagster.domain import (
    NO_EXPIRY,
    BudgetWindow,
    CounterReading,
    OmittedCounter,
    UnreadableKey,
    UnusableNameError,
    ValueShape,
    Window,
)
from budget_recovery_dagster.errors import StoreReadError

NOVEMBER = Window.parse("2026-11")

names = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40
)
windows = st.sampled_from(["2026-11-29", "2026-W48", "2026-11", "2026-Q4", "lifetime"])


def stored(data: bytes) -> LiveKey:
    return LiveKey(1, StoredValue(data, None, 0))


# Names and tokens


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("acme", "acme"),
        ("A-z_09/b", "A-z_09/b"),
        ("alice@example.com", "alice=40example=2Ecom"),
        ("openai/gpt-4o:2024", "openai/gpt-4o=3A2024"),
        ("*", "=2A"),
        (">", "=3E"),
        ("=", "=3D"),
        ("=2A", "=3D2A"),
        (" ", "=20"),
        ("a\nb", "a=0Ab"),
        ("東京", "=E6=9D=B1=E4=BA=AC"),
        ("\N{GRINNING FACE}", "=F0=9F=98=80"),
        ("\u0660", "=D9=A0"),  # a digit, but not one of ASCII
    ],
)
def test_a_name_is_encoded_as_a_token(name: str, token: str) -> None:
    assert encode_name(name) == token
    assert decode_name(token) == name


@given(names)
def test_every_name_survives_a_round_trip_and_its_token_has_no_wildcard(name: str) -> None:
    token = encode_name(name)
    assert decode_name(token) == name
    assert token != "="
    assert set(token) <= set(string.ascii_letters + string.digits + "-_/=")


@given(st.text(alphabet="aA0=-/ _2AEFf4.*>é", max_size=12))
def test_a_decodable_token_is_the_only_one_of_its_name(token: str) -> None:
    try:
        name = decode_name(token)
    except UnusableNameError:
        return
    assert encode_name(name) == token


NOT_CANONICAL = ["", "=", "a.b", "*", ">", "a b", "a\n", "\N{LATIN SMALL LETTER E WITH ACUTE}"]
NOT_CANONICAL += ["=4", "=4G", "=2a", "a=", "=41", "=2D", "=00", "=FF", "=C0=80", "=ED=A0=80"]


@pytest.mark.parametrize("token", NOT_CANONICAL)
def test_a_token_in_another_form_is_rejected(token: str) -> None:
    with pytest.raises(UnusableNameError) as caught:
        decode_name(token)
    assert str(caught.value).isascii()


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800"])
def test_an_unusable_name_is_rejected(name: str) -> None:
    with pytest.raises(UnusableNameError):
        encode_name(name)
    with pytest.raises(UnusableNameError):
        encode_entity(name)


def test_the_aggregate_is_the_bare_token() -> None:
    assert encode_entity(None) == "="
    assert decode_entity("=") is None
    assert encode_entity("=") == "=3D"


# Keys


@given(names, names, windows, st.none() | names)
def test_every_counter_key_survives_a_round_trip(
    tenant: str, budget: str, window: str, entity: str | None
) -> None:
    counter = CounterKey(tenant, BudgetWindow(budget, Window.parse(window)), entity)
    key = encode_key(counter)
    assert decode_key(key) == counter
    assert key.startswith(tenant_prefix(COUNTERS, tenant))
    assert key.count(".") == 4


@given(names, names, windows)
def test_every_leaderboard_key_survives_a_round_trip(tenant: str, budget: str, window: str) -> None:
    board = BoardKey(tenant, BudgetWindow(budget, Window.parse(window)))
    key = encode_board_key(board)
    assert decode_board_key(key) == board
    assert key.startswith(tenant_prefix(BOARDS, tenant))
    assert key.count(".") == 3


def test_an_example_key() -> None:
    counter = CounterKey("acme", BudgetWindow("team a", NOVEMBER), "user:alice@example.com")
    assert encode_key(counter) == "usage.acme.team=20a.2026-11.user=3Aalice=40example=2Ecom"


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("usage.t.b.2026-11", "has 4 parts"),
        ("usage.t.b.2026-11.e.f", "has 6 parts"),
        ("blocked.t.b.2026-11.e", "has 5 parts where a counter's key has 5, usage."),
        ("usage.=.b.2026-11.e", "tenant '=': an empty name"),
        ("usage.t.=.2026-11.e", "budget '=': an empty name"),
        ("usage.t.b c.2026-11.e", "budget 'b c': not an encoded name"),
        ("usage.t.=FF.2026-11.e", "budget '=FF': not UTF-8"),
        ("usage.t.b.2026-13.e", "'2026-13' is not a window"),
        ("usage.t.b.\N{CJK UNIFIED IDEOGRAPH-6771}.e", r"'\xe6\x9d\xb1' is not a window"),
        ("usage.t.b.2026-11.=00", "entity '=00': a name with a NUL character"),
        ("usage.t.b.2026-11.=61", "entity '=61': escapes a character that needs no escape"),
        ("usage.t.b.2026-11.\udcff", r"entity '\xff': not an encoded name"),
        ("usage.t.b.2026-11." + "e" * 983, "a key of 1001 bytes, more than 1000"),
    ],
)
def test_a_key_that_is_not_a_counter_is_rejected_with_the_reason(key: str, reason: str) -> None:
    with pytest.raises(UnreadableKeyError) as caught:
        decode_key(key)
    message = str(caught.value)
    assert reason in message
    assert message.isascii()
    assert message.isprintable()
    assert len(message) <= 200


def test_a_key_has_at_most_a_thousand_bytes() -> None:
    of = BudgetWindow("b", NOVEMBER)
    longest = CounterKey("t", of, "e" * (MAX_KEY_BYTES - len("usage.t.b.2026-11.")))
    assert len(encode_key(longest)) == MAX_KEY_BYTES
    assert decode_key(encode_key(longest)) == longest
    with pytest.raises(UnusableNameError, match="1001 bytes"):
        encode_key(CounterKey("t", of, f"{longest.entity}e"))
    with pytest.raises(UnusableNameError, match="more than 1000"):
        tenant_prefix(COUNTERS, "@" * 400)
    with pytest.raises(StoreReadError, match="The tenant name '@@"):
        prefix_to_read(COUNTERS, "@" * 400)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("leaderboard.t.b", "has 3 parts where a leaderboard's key has 4, leaderboard.tenant.b"),
        ("leaderboard.t.b.2026-11.e", "has 5 parts where a leaderboard's key has 4"),
        ("usage.t.b.2026-11", "has 4 parts where a leaderboard's key has 4, leaderboard."),
        ("leaderboard.=.b.2026-11", "tenant '=': an empty name"),
        ("leaderboard.t.=FF.2026-11", "budget '=FF': not UTF-8"),
        ("leaderboard.t.b.2026-13", "'2026-13' is not a window"),
        ("leaderboard.t." + "b" * 979 + ".2026-11", "a key of 1001 bytes, more than 1000"),
    ],
)
def test_a_key_that_is_not_a_leaderboard_is_rejected_with_the_reason(key: str, reason: str) -> None:
    with pytest.raises(UnreadableKeyError) as caught:
        decode_board_key(key)
    assert reason in str(caught.value)


def test_an_example_leaderboard_key_has_at_most_a_thousand_bytes() -> None:
    of = BudgetWindow("team a", NOVEMBER)
    assert encode_board_key(BoardKey("acme", of)) == "leaderboard.acme.team=20a.2026-11"
    longest = BoardKey("t", BudgetWindow("b" * 978, NOVEMBER))
    assert len(encode_board_key(longest)) == MAX_KEY_BYTES
    with pytest.raises(UnusableNameError, match="1001 bytes"):
        encode_board_key(BoardKey("t", BudgetWindow("b" * 979, NOVEMBER)))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=1200))
def test_any_key_is_printable(key: str) -> None:
    shown = printable(key)
    assert shown.isascii()
    assert shown.isprintable()
    assert len(shown) <= 4 * MAX_KEY_BYTES + 20


# Lists and reads

HOSTILE_KEYS = [
    *("usage.a", "usage.a.b", "usage.a.b.2026-11.=", "usage.a.=", "usage.b", "usage.b.x.y.z.u"),
    *("usage.=", "usage.=.b.2026-11.=", "usage.=FF.b.2026-11.=", "usage.\udcff.b", "usage.\udcfe"),
    *("usage.=2A.b.2026-11.=", "usage.*.b", "usage.=2a.b", "usage.=00.b", "usage.a\x0b.b"),
]


def test_tenants_are_listed_and_keys_without_a_tenant_are_unreadable() -> None:
    listing = list_tenants(
        COUNTERS,
        [
            "usage.b.x.2026-11.=",
            "usage.=E6=9D=B1=E4=BA=AC.x.2026-11.=",
            "usage.t.anything",
            "usage.a",
            "usage.a.x.2026-11.=",
            "usage.=.x.2026-11.=",
            "usage.=00.x.2026-11.=",
            "usage.*.x.2026-11.=",
            "usage." + "l" * 1000 + ".x.2026-11.=",
        ],
    )
    assert listing.tenants == {"a", "b", "t", "東京"}
    assert listing.unreadable == (
        UnreadableKey("usage.*.x.2026-11.=", "not an encoded name"),
        UnreadableKey("usage.=.x.2026-11.=", "an empty name"),
        UnreadableKey(
            "usage.=00.x.2026-11.=", "a name with a NUL character, which PostgreSQL cannot store"
        ),
        UnreadableKey("usage.a", "ends after the tenant"),
        UnreadableKey(
            "usage." + "l" * 994 + "... (1018 bytes)", "a key of 1007 bytes, more than 1000"
        ),
    )


@given(st.lists(st.sampled_from(HOSTILE_KEYS), max_size=20), st.randoms())
def test_a_listing_depends_neither_on_the_order_nor_on_repetition(
    keys: list[str], chance: Random
) -> None:
    listing = list_tenants(COUNTERS, keys)
    shuffled = keys * 2
    chance.shuffle(shuffled)
    assert list_tenants(COUNTERS, shuffled) == listing
    # Each key alone decides what is known of it.
    alone = [list_tenants(COUNTERS, [key]) for key in set(keys)]
    assert listing.tenants == frozenset().union(*(each.tenants for each in alone))
    unreadable = [bad for each in alone for bad in each.unreadable]
    assert listing.unreadable == tuple(sorted(unreadable, key=lambda bad: bad.key))


def test_an_unreadable_key_or_value_does_not_affect_others() -> None:
    reading = read_counters(
        "t",
        KeysRead(
            {
                "usage.t.b.2026-11.=": stored(b"3"),
                "usage.t.b.2026-11.bad": stored(b"?"),
                "usage.t.b.2026-11.good": stored(b'{"usage":"2"}'),
                "usage.t.b.2026-14.e": stored(b"1"),
            },
            is_partial=True,
        ),
    )
    of = BudgetWindow("b", NOVEMBER)
    assert reading.counters == (
        CounterReading(of, None, Decimal(3), ValueShape.BARE, NO_EXPIRY),
        CounterReading(of, "good", Decimal(2), ValueShape.TEXT, NO_EXPIRY),
    )
    assert reading.omitted == (
        OmittedCounter(of, "bad", "usage.t.b.2026-11.bad", "the value is not JSON"),
    )
    assert reading.unreadable == (
        UnreadableKey("usage.t.b.2026-14.e", "'2026-14' is not a window"),
    )
    assert reading.is_partial
