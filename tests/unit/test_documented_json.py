"""docs/json.md lists all keys, types and codes of all JSON documents."""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any

from click.testing import CliRunner

import budget_recovery_dagster
from budget_recovery_dagster import errors
from budget_recovery_dagster.cli.main import main
from budget_recovery_dagster.domain import (
    EVERYONE,
    Action,
    Attempt,
    AuditEntry,
    Bound,
    BudgetWindow,
    CaptureSource,
    Change,
    ConfigurationChange,
    Damage,
    Difference,
    Ended,
    Evidence,
    FailureReason,
    GivenUp,
    Held,
    Hour,
    IncidentAmounts,
    JudgedFalls,
    KeptPreview,
    ListedSnapshot,
    Loss,
    LossAmounts,
    OmittedCounter,
    Outcome,
    PlannedAmounts,
    Recovery,
    RecoveryState,
    Reset,
    RestoreChoice,
    Restored,
    RunOutcome,
    Stopped,
    TenantWindow,
    UnreadableKey,
    Verdict,
    Waiting,
    Window,
    WindowAmounts,
    WindowPoint,
    Written,
)
from budget_recovery_dagster.errors import (
    UNEXPECTED_ERROR,
    BudgetRecoveryError,
    LeaseHeldError,
    SettingsError,
)
from budget_recovery_dagster.presentation import (
    CHANGES,
    FAILURES,
    INTERRUPTED,
    STATUS_UNREAD,
    USAGE_ERROR,
    Warned,
    applied_json,
    captured_json,
    discarded_json,
    error_json,
    failure_json,
    held_json,
    interrupted_json,
    label,
    preview_json,
    reset_json,
    resolved_json,
    snapshots_json,
    status_json,
    usage_error_json,
)
from budget_recovery_dagster.sandbox import NoRunningDevError
from budget_recovery_dagster.services import (
    WRITTEN,
    Attention,
    Captured,
    Condition,
    Doubt,
    EntryPreview,
    Preview,
    RecordedReset,
    TenantAbsent,
    TenantFailed,
    TenantPreview,
    TenantStored,
    WindowPreview,
)
from budget_recovery_dagster.services.future_snapshots import FutureSnapshots, LostUsage
from budget_recovery_dagster.services.restore import (
    Acceptance,
    Applied,
    LowerCounters,
    Remainder,
    Resolved,
    TenantRestored,
)
from tests import documentation
from tests.unit.known_states import (
    IDENTITY,
    NOW,
    Known,
    ago,
    check,
    closed,
    fall,
    gone,
    incident,
    run,
    unknown,
)

PAGE = "docs/json.md"

ENUMS: Mapping[str, type[StrEnum]] = {
    "Condition": Condition,
    "Doubt code": Doubt,
    "Attention code": Attention,
    "Warning code": Warned,
    "State": RecoveryState,
    "Verdict": Verdict,
    "Evidence": Evidence,
    "Outcome": Outcome,
    "Failure reason": FailureReason,
    "Bound": Bound,
    "Action": Action,
    "Change": Change,
    "Source": CaptureSource,
    "Run outcome": RunOutcome,
    "Acceptance": Acceptance,
}

INTERNAL = {
    "Answer": "the table of verdicts",
    "ColumnKind": "columns of the Parquet tables",
    "Enforcement": "the database: budget",
    "Event": "errors of the program",
    "FallOutcome": "the database: usage_fall",
    "Found": "the table of verdicts",
    "LandmarkKind": "the database: landmark",
    "Outcome": "doctor, whose page is docs/doctor.md, and that of incidents, which is above",
    "Period": "the database: budget",
    "Phase": "the supervision of runs",
    "SplitBy": "the database: budget",
    "Uncaptured": "the database: capture_failure",
    "ValueShape": "the database: record",
    "Written": "the notes of a restore",
}
"""Where the codes of each other class occur: in no document of this page."""

CODES = {STATUS_UNREAD, *(member.value for enum in ENUMS.values() for member in enum)}


def is_text(value: Any) -> bool:
    """Whether the text is free text, not a code that the page must list."""
    return isinstance(value, str) and value not in CODES


SCALARS: Mapping[str, Callable[[Any], bool]] = {
    "text": is_text,
    "sentence": is_text,
    "time": lambda value: bool(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", value)),
    "usage": lambda value: bool(re.fullmatch(r"\d+(\.\d+)?", value)),
    "sequence": lambda value: bool(re.fullmatch(r"\d+", value)),
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "boolean": lambda value: type(value) is bool,
}


def first_column(heading: str, named: str) -> Iterator[list[str]]:
    """Return the rows of the table below a heading whose first column has this name."""
    table = documentation.section(PAGE, heading).split(f"| {named} |", 1)[1].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def keys_of(heading: str) -> dict[str, str]:
    return {documentation.code(key): kind for key, kind, _ in first_column(heading, "key")}


def codes_of(heading: str) -> list[str]:
    return [documentation.code(code) for code, _ in first_column(heading, "code")]


def headings_of(column: str) -> set[str]:
    return {
        heading
        for heading in documentation.headings(PAGE)
        if f"| {column} |" in documentation.section(PAGE, heading).split("\n#")[0]
    }


def named(link: str) -> str:
    """Return the heading that a type links to."""
    text, anchor = re.fullmatch(r"\[([^]]+)\]\(#([\w-]+)\)", link).groups()  # type: ignore[union-attr]
    assert anchor == text.replace(" ", "-")
    (heading,) = [each for each in documentation.headings(PAGE) if each.lower() == text]
    return heading


class Documented:
    """What the documents contained: headings of objects, and keys that were null."""

    def __init__(self) -> None:
        self.objects: set[str] = set()
        self.null: set[tuple[str, str]] = set()
        self.filled: set[tuple[str, str]] = set()

    def compare(self, document: Any, heading: str) -> None:
        """Require that an object has the keys and types below a heading, in this order."""
        kinds = keys_of(heading)
        assert list(document) == list(kinds), heading
        self.objects.add(heading)
        for key, value in document.items():
            if value is None:
                assert not kinds[key].startswith("map of "), (heading, key)
                assert kinds[key].endswith(" or null"), (heading, key)
                self.null.add((heading, key))
            else:
                self._compare_value(value, kinds[key], (heading, key))

    def _compare_value(self, value: Any, kind: str, where: tuple[str, str]) -> None:
        if kind.startswith("map of "):
            of = kind.removeprefix("map of ")
            for each in value.values():
                if each is None:
                    assert of.endswith(" or null"), where
                else:
                    self._compare_value(each, of, where)
            return
        kind = kind.removesuffix(" or null")
        if kind.startswith("list of "):
            assert isinstance(value, list), where
            for each in value:
                self._compare_value(each, kind.removeprefix("list of "), where)
        elif kind.startswith("["):
            self._compare_named(value, named(kind))
            self.filled.add(where)
        else:
            assert SCALARS[kind](value), (where, value)
            self.filled.add(where)

    def _compare_named(self, value: Any, heading: str) -> None:
        if heading in headings_of("code"):
            assert value in codes_of(heading), (heading, value)
        else:
            self.compare(value, heading)


DAY = BudgetWindow("per user", Window.parse("2026-11-30"))
ERROR = LeaseHeldError("A restore is running.", "wait.")
CHOICE = RestoreChoice("acme", "per user", ago(60), despite_resets=True)
OMITTED = OmittedCounter(DAY, "alice", "usage.acme.alice", "it is no number")
ENTRY = EntryPreview(
    tenant="acme",
    of=DAY,
    entity="alice",
    live=Decimal(1),
    recorded=Decimal("2.5"),
    result=Decimal("2.5"),
    action=Action.RAISE,
    source=ago(60),
    blocks=True,
)
AGGREGATE = replace(ENTRY, entity=None, live=None, result=None, blocks=None)
WINDOW = WindowPreview(
    tenant="acme",
    point=WindowPoint(
        of=DAY,
        usages={},
        newest_at=ago(60),
        shape=None,
        expiries={},
        corrupt=(ago(180),),
        is_truncated=True,
        is_partial=True,
        omitted=(OMITTED,),
        omitted_count=1,
    ),
    counters=2,
    raised=1,
    kept=1,
    skipped=0,
    missing=0,
    unread=(),
    is_closed=False,
    amounts=PlannedAmounts(
        live=Decimal(1),
        recorded=Decimal("2.5"),
        result=Decimal("2.5"),
        rise=Decimal("1.5"),
        is_least=False,
    ),
    newest_source=ago(60),
    oldest_source=ago(120),
    limit=Decimal(2),
    is_enforced=True,
    blocked_before=0,
    blocked_after=1,
)
# All its records are damaged.
UNKNOWN_WINDOW = replace(
    WINDOW,
    point=replace(WINDOW.point, corrupt=(ago(60),)),
    newest_source=None,
    oldest_source=None,
    limit=None,
)
TENANT = TenantPreview(
    "acme",
    ago(60),
    (WINDOW, UNKNOWN_WINDOW),
    (ENTRY, AGGREGATE),
    (UnreadableKey("k", "no name"),),
    1,
)
UNSEEN = TenantPreview("globex", None, failure=ERROR)
OPEN = incident(
    9,
    losses=(
        Loss(ago(9), "sensor", Verdict.LOST, "It is gone.", IDENTITY, None, Evidence.GONE),
        Loss(ago(8), "run 1", Verdict.LOST, "Another.", IDENTITY, IDENTITY),
    ),
    attempts=1,
    launches=1,
    next_launch_at=ago(-1),
    next_attempt_at=ago(-1),
    waiting=Waiting(ago(5), "A replica is behind.", 2),
    held=Held(ago(4), "alice@ops", "an upgrade"),
    released_at=ago(3),
    given_up=GivenUp(ago(2), FailureReason.NOT_WRITTEN, "No response.", "store_unreachable"),
)
ENDED = replace(OPEN, ended=Ended(ago(1), Outcome.RESTORED, "All.", Restored(1, 1, 1, 1)))
BARE = incident(
    9,
    newest_point_at=None,
    last_good_at=None,
    given_up=GivenUp(ago(2), FailureReason.NO_SNAPSHOTS, "None is stored."),
)
HELD = incident(9, held=Held(ago(4), "alice@ops", "an upgrade"))
ATTEMPT = Attempt(OPEN.incident_id, 1, 1, "run 1", "host", ago(6), ago(5), "The bucket is full.")
PREVIEW = Preview(
    "0c9a7a54",
    NOW,
    CHOICE,
    Recovery(RecoveryState.RECOVERING, OPEN),
    IDENTITY,
    (TENANT, UNSEEN),
    (ENTRY,),
    None,
    "a replica is behind",
)
AUDIT = AuditEntry(
    "acme", DAY, ago(60), 2, 1, 1, 1, 0, Decimal(1), Decimal("2.5"), ("1 counter left",)
)
COUNTED = replace(
    AUDIT, amounts=LossAmounts(Decimal("1.5"), Decimal(1), Bound.AT_MOST, {"alice": Decimal(1)})
)
AMOUNTS = IncidentAmounts(
    restored_windows=2,
    counted_windows=1,
    unknown_windows=1,
    restored=(
        WindowAmounts("acme", DAY, Decimal(4), None, Bound.UNKNOWN),
        WindowAmounts("globex", DAY, Decimal("1.5"), Decimal(1), Bound.ESTIMATE),
    ),
    counted=(WindowAmounts("globex", DAY, Decimal("1.5"), Decimal(1), Bound.EXACT),),
)
REMAINDER = Remainder(
    1,
    2,
    3,
    ("Tenant 'globex' cannot be read.",),
    (LowerCounters("acme", DAY, frozenset({None}), Decimal(4), are_all=True),),
)
APPLIED = Applied(
    choice=CHOICE,
    preview=KeptPreview("0c9a7a54", NOW, "alice@ops", CHOICE, IDENTITY),
    differences=(
        Difference("acme", DAY, "alice", Change.LIVE, Decimal(1), None),
        Difference("acme", DAY, None, Change.NEW, None, Decimal(1)),
    ),
    uncompared=("globex",),
    absent=("initech",),
    tenants=(TenantRestored("acme", (AUDIT, COUNTED)), TenantRestored("globex", (), ERROR)),
    failure=ERROR,
    incident=ENDED,
    remainder=REMAINDER,
    others=replace(
        REMAINDER, lower=(LowerCounters("acme", DAY, frozenset({"bob"}), Decimal(1), are_all=True),)
    ),
    amounts=AMOUNTS,
)
RESET = RecordedReset(
    Reset("acme", "per user", "2026-11-30", "alice", ago(5), "bob@ops", "wrong price", NOW),
    (DAY,),
    is_restoring=True,
    unmarked="NATS is away.",
)
SNAPSHOT = ListedSnapshot(
    ago(60), CaptureSource.COUNTERS, 1, 2, 3, 4, 5, 6, Decimal("1.5"), 7, is_pruned=False
)

CAPTURED = Captured(
    hour=Hour.containing(ago(60)),
    captured_at=ago(60),
    source=CaptureSource.COUNTERS,
    identity=IDENTITY,
    outcomes=(
        TenantStored(
            tenant="acme",
            records=1,
            truncated=0,
            closed=0,
            entries=2,
            most_used=Decimal(3),
            omitted=0,
            unreadable=0,
            drops=1,
            most_missing=Decimal("1.5"),
            is_partial=False,
            seconds=0.1,
        ),
        TenantAbsent("initech", 0.1),
        TenantFailed.because("globex", ERROR, 0.1),
    ),
    unreadable=(),
    stopped_by=ERROR,
)


def statuses() -> Iterator[str]:
    known = Known(
        recovered=Recovery(RecoveryState.FAILED, OPEN),
        amounts=AMOUNTS,
        attempts=(ATTEMPT,),
        incidents=(closed(300),),
        checks=(
            replace(check(1), incident_id=OPEN.incident_id, evidence=Evidence.MARKER_REMOVED),
            unknown(11),
            check(21),
        ),
        points={"acme": ago(60), "initech": ago(300)},
        snapshots={"initech": ago(60)},
        damaged={"acme": 1},
        unverified=("globex",),
        failing_tenants={"acme": ago(60), "globex": None},
        falls=(fall("acme", "per user", 3, "41.5"),),
        gone=(gone("acme", 2),),
        changes=(ConfigurationChange("max_age", "unlimited", "60 s", ago(5)),),
        runs=(run(30, RunOutcome.FAILED, skew=6, error=Stopped("clock_skew", "Off.", "use NTP.")),),
    )
    yield status_json(known.status(), 2)
    yield status_json(replace(known, incidents=(ENDED,)).status(), 2)
    yield status_json(
        replace(known, recovered=Recovery(RecoveryState.RECOVERING, HELD)).status(), 2
    )
    yield status_json(replace(known, recovered=Recovery(RecoveryState.HEALTHY, None)).status(), 4)
    running = replace(ATTEMPT, incident_id=BARE.incident_id, ended_at=None, outcome=None)
    bare = Known(recovered=Recovery(RecoveryState.RECOVERING, BARE), attempts=(running,))
    yield status_json(bare.status(), 1)
    unseen = replace(unknown(1), identity=None)
    yield status_json(Known(checks=(unseen,), runs=(run(1, None),)).status(), 3)
    yield failure_json(SettingsError("No database is set.", "set one."), 3)


def documents() -> Iterator[tuple[str, str]]:
    """Return the JSON documents of all commands but doctor, filled and empty, with headings."""
    for status in statuses():
        yield "status", status
    yield "preview", preview_json(PREVIEW)
    every = RestoreChoice()
    healthy = Recovery(RecoveryState.HEALTHY, None)
    yield "preview", preview_json(replace(PREVIEW, choice=every, recovery=healthy))
    yield "restore", applied_json(APPLIED)
    yield "restore", applied_json(replace(APPLIED, incident=OPEN, amounts=None))
    nothing = replace(
        APPLIED, preview=None, failure=None, incident=None, remainder=None, others=None
    )
    yield "restore", applied_json(nothing)
    resolved = Resolved(ENDED, Acceptance.RECORD_RESETS, REMAINDER, (RESET.reset,), ago(-60))
    yield "resolve", resolved_json(resolved, run(0), None)
    resolved = Resolved(OPEN, Acceptance.KEEP_SNAPSHOTS, REMAINDER)
    yield "resolve", resolved_json(resolved, None, ERROR)
    yield "hold and release", held_json(OPEN)
    yield "hold and release", held_json(BARE)
    listed = [SNAPSHOT, replace(SNAPSHOT, most_missing=None)]
    yield "snapshots", snapshots_json(listed, ["per user"], Damage({"acme": 1}, ("globex",)))
    yield "snapshot", captured_json(CAPTURED)
    yield "snapshot", captured_json(replace(CAPTURED, stopped_by=None))
    lost = LostUsage(TenantWindow("acme", DAY), 1, Decimal(2))
    discarded = FutureSnapshots((SNAPSHOT,), NOW, (lost,), JudgedFalls(), None)
    yield "discard-future", discarded_json(discarded)
    yield "record-reset", reset_json(RESET)
    everyone = replace(RESET.reset, window=None, entity=EVERYONE)
    yield "record-reset", reset_json(replace(RESET, reset=everyone, unmarked=None))


def refusals() -> Iterator[str]:
    """Return what refused or interrupted commands and commands with wrong options print."""
    yield error_json(ERROR)
    yield error_json(KeyError("x"))
    yield interrupted_json("Interrupted.", "see the audit.")
    yield usage_error_json("--json needs --yes.")
    yield CliRunner().invoke(main, ["restore", "--reason", "x", "--json"]).stdout


ALWAYS_NULL = {
    (command, "error")
    for command in (
        "preview",
        "resolve",
        "hold and release",
        "snapshots",
        "record-reset",
        "discard-future",
    )
}


def test_every_key_and_type_is_documented() -> None:
    documented = Documented()
    for heading, document in documents():
        documented.compare(json.loads(document), heading)
    for refusal in refusals():
        content = json.loads(refusal)
        assert list(content) == ["schema", "error"]
        documented.compare(content["error"], "Error")
    headings = headings_of("key")
    assert documented.objects == headings
    kinds = {(heading, key): kind for heading in headings for key, kind in keys_of(heading).items()}
    assert documented.filled == set(kinds) - ALWAYS_NULL
    assert documented.null == {
        where
        for where, kind in kinds.items()
        if kind.endswith(" or null") and not kind.startswith("map of ")
    }


def test_the_schema_is_the_first_key_of_every_document() -> None:
    for document in (*(document for _, document in documents()), *refusals()):
        assert next(iter(json.loads(document).items())) == ("schema", 1)


def enums() -> dict[str, list[str]]:
    """Return the values of every StrEnum of the package, by the name of its class."""
    found: dict[str, list[str]] = {}
    for module in Path(budget_recovery_dagster.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and "StrEnum" in map(ast.unparse, node.bases):
                values = (each.value for each in node.body if isinstance(each, ast.Assign))
                found.setdefault(node.name, []).extend(map(ast.literal_eval, values))
    return found


def test_every_code_is_listed() -> None:
    for heading, enum in ENUMS.items():
        extra = [STATUS_UNREAD] if enum is Doubt else []
        assert codes_of(heading) == [*enum, *extra], heading
    assert headings_of("code") == {*ENUMS, "Error code"}


def test_every_enum_is_on_the_page_or_known_to_be_in_no_document() -> None:
    found = enums()
    listed = {enum.__name__ for enum in ENUMS.values()}
    assert set(found) == listed | set(INTERNAL)
    # Those are names of Arrow's types.
    del found["ColumnKind"]
    for name, values in found.items():
        assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", value) for value in values), name


def test_labels_are_words() -> None:
    assert label(Verdict.DATABASE_BEHIND) == "database behind"
    assert label(Outcome.RESTORED_IN_PART) == "restored in part"
    for enum, labels in ((FailureReason, FAILURES), (Change, CHANGES), (Written, WRITTEN)):
        assert set(labels) == set(enum)
        assert not any("_" in each for each in labels.values())


def test_every_error_code_is_listed() -> None:
    own = {
        each.code
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, BudgetRecoveryError)
    }
    # The base class is never raised. The other errors belong to commands without JSON.
    expected = own - {BudgetRecoveryError.code} | {NoRunningDevError.code}
    assert set(codes_of("Error code")) == expected | {
        INTERRUPTED,
        UNEXPECTED_ERROR,
        USAGE_ERROR,
    }


def test_the_code_of_an_error_is_the_name_of_its_class() -> None:
    assert errors.StoreNoQuorumError.code == "store_no_quorum"
    assert errors.error_code(KeyError("x")) == UNEXPECTED_ERROR
