"""Placeholders in recorded scenes, and the comparison of recordings."""

from datetime import UTC, datetime

import pytest

from tests.scenes.compare import differences
from tests.scenes.placeholders import Known, Rows, normalized, replaced

SNAPSHOT = datetime(2026, 11, 29, 15, 2, 3, 456789, tzinfo=UTC)
RUN = "0c9a7a54-3b43-4d31-9a3c-1de1f0b45a01"
KNOWN = Known(
    {"/srv/home": "<home>", "2026-11": "<month>", "2026-11-29": "<day>"},
    (SNAPSHOT,),
    frozenset({RUN}),
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from 2026-11-29T15:02:03.456789Z", "from <snapshot 1>"),
        ("from 2026-11-29 15:02:03 UTC", "from <snapshot 1> UTC"),
        ("at 2026-11-29 15:02:04 UTC", "at <time> UTC"),
        ("at 15:02:04 UTC", "at <clock> UTC"),
        ("hour 2026-11-29T15Z", "hour <hour>"),
        ("usage.acme.team.2026-11.=", "usage.acme.team.<month>.="),
        ("usage.acme.team.2026-11-29.=", "usage.acme.team.<day>.="),
        (f"run {RUN}, in short {RUN[:8]}", "run <id 1>, in short <id 1 in short>"),
        ("12 s ago, every 1h 30min", "<span> ago, every <span> <span>"),
        ("sequence 17, pid 4711", "sequence <number>, pid <number>"),
        ("in /srv/home/tables", "in <home>/tables"),
        ("3 tenants    2 windows", "3 tenants  2 windows"),
    ],
)
def test_volatile_texts_are_replaced(text: str, expected: str) -> None:
    assert normalized(text, KNOWN) == expected


def test_times_are_numbered_by_first_appearance_in_each_document() -> None:
    first, second = "2026-11-29T15:00:00.25+00:00", "2026-11-29T15:00:01.5Z"
    content = {"opened_at": second, "ended_at": first, "again": second}
    assert normalized(content, KNOWN) == {
        "opened_at": "<time 1>",
        "ended_at": "<time 2>",
        "again": "<time 1>",
    }


def test_only_numbers_with_a_volatile_key_are_replaced() -> None:
    content = {"counters": 3, "last_sequence": "17", "duration_seconds": 0.25, "usage": "12.5"}
    assert normalized(content, KNOWN) == {
        "counters": 3,
        "last_sequence": "<number>",
        "duration_seconds": "<number>",
        "usage": "12.5",
    }


def test_rows_are_sorted_by_their_stable_values() -> None:
    late, early = "2026-11-29T15:00:02.5Z", "2026-11-29T15:00:01.5Z"
    rows = Rows([{"at": early, "tenant": "b"}, {"at": late, "tenant": "a"}])
    assert normalized(rows, KNOWN) == [
        {"at": "<time 1>", "tenant": "a"},
        {"at": "<time 2>", "tenant": "b"},
    ]


def test_ids_are_numbered_for_each_key() -> None:
    content = [{"content_id": 7, "check_id": 7}, {"content_id": 9}, {"content_id": 7}]
    assert normalized(content, KNOWN) == [
        {"content_id": "<content_id 1>", "check_id": "<check_id 1>"},
        {"content_id": "<content_id 2>"},
        {"content_id": "<content_id 1>"},
    ]


def test_equal_rows_are_sorted_by_the_number_of_their_ids() -> None:
    first, second = RUN, RUN.replace("0c9a", "000a")
    content = {"runs": [first, second], "rows": Rows([{"run": second}, {"run": first}])}
    assert normalized(content, KNOWN)["rows"] == [{"run": "<id 1>"}, {"run": "<id 2>"}]


def test_fixed_documents_keep_their_times() -> None:
    text = "such as 2026-11-29T14:00, below /srv/home"
    assert replaced([text], {"/srv/home": "<home>"}) == ["such as 2026-11-29T14:00, below <home>"]


def test_differences_are_shown_by_scene_and_document() -> None:
    before = {"loss": {"status": {"state": "A"}, "store": 1}, "gone": {}}
    after = {"loss": {"status": {"state": "B"}, "store": 1, "files": 2}}
    assert list(differences(before, before)) == []
    assert list(differences(before, after)) == [
        "=== loss / status",
        "@@ -1,3 +1,3 @@",
        " {",
        '- "state": "A"',
        '+ "state": "B"',
        " }",
        "=== loss / files: only in the second recording",
        "=== gone: only in the first recording",
    ]
