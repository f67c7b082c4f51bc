"""The steps of the demo, their output, and the verdict: whether everything came back.

A store is lost, and restored by the services that Dagster runs. ``judge`` and ``account`` are pure:
they compare figures that were read from the servers.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import TypeVar
from uuid import uuid4

import psycopg
from pydantic import SecretStr
from rich.console import Console
from rich.table import Table
from rich.text import Text

from budget_recovery_dagster.adapters.nats.codec import CounterKey
from budget_recovery_dagster.domain.audits import Bound, LossAmounts
from budget_recovery_dagster.domain.counters import BudgetWindow, budget_usage, format_usage
from budget_recovery_dagster.domain.incident import Incident
from budget_recovery_dagster.domain.verdict import Verdict
from budget_recovery_dagster.domain.windows import Hour, Window
from budget_recovery_dagster.embedded import poll
from budget_recovery_dagster.errors import AttemptFailedError, HourClosedError, HourNotCapturedError
from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.presentation.terminal import print_wrapped
from budget_recovery_dagster.presentation.text import escape_unprintable, label
from budget_recovery_dagster.sandbox.demo.stage import (
    AGENT,
    BUDGET,
    LIMIT,
    NEWCOMER,
    REQUEST,
    TENANT,
    DemoError,
    DemoGateway,
    Figures,
    Stage,
    Usages,
    counter_of_entity,
    is_of_the_budget,
)
from budget_recovery_dagster.sandbox.gateway.store import described, suffix_of
from budget_recovery_dagster.services.capture import Captured, Paused, Verified, capture_hour
from budget_recovery_dagster.services.check import check_store
from budget_recovery_dagster.services.restore.automatic import (
    GaveUp,
    NothingToDo,
    Recovered,
    RecoveryResult,
    StillWaiting,
    recover_store,
)
from budget_recovery_dagster.settings import Settings
from budget_recovery_dagster.wiring import opened_control_plane, store_opener

# How long traffic runs before the next step.
_TRAFFIC_SECONDS = 2.0
_BLOCKS_SECONDS = 20.0

_HOLDER = "budget-recovery demo"
# In an installation the sensors retry.
_TRIES = 3
_RETRY_SECONDS = 2.0

_WIDEST = 80
_MARGIN = 4
_AMOUNT = 18
_MOST_NAMED = 10
_BROKEN_MARGIN = " " * 8
# Costs in the sandbox have no more decimals.
_DECIMALS = 7

_SNAPSHOT = """
select tenant, budget_id, window_token, entity, usage from budget_recovery.budget_entry
where captured_at = %s
"""

Found = TypeVar("Found")
NotCaptured = Verified | Paused | HourClosedError | HourNotCapturedError


@dataclass(frozen=True, slots=True)
class Evidence:
    """The newest snapshot, and the figures before the wipe, before the restore and at the end.

    ``is_refused`` is whether the request that was refused before the wipe is refused at the end.
    ``reported`` is what the incident reports of the budget of the story, None if it knows nothing.
    """

    snapshot: Usages
    before_wipe: Figures
    after_wipe: Figures
    at_the_end: Figures
    is_refused: bool
    reported: LossAmounts | None = None


@dataclass(frozen=True, slots=True)
class Promise:
    """A statement that must hold, and where it does not."""

    text: str
    broken: tuple[str, ...]

    @property
    def is_kept(self) -> bool:
        """Whether it holds."""
        return not self.broken


def judge(evidence: Evidence) -> tuple[Promise, ...]:
    """Return what must hold after a complete recovery, and where it does not.

    Only windows that are current at the end count, because the gateway removes the counters of
    windows that close meanwhile. With nothing to compare, nothing is proven: that breaks a promise.
    """
    end = evidence.at_the_end

    def is_current(counter: CounterKey) -> bool:
        return counter.of.window.is_current(end.at)

    recorded = _only(evidence.snapshot, is_current)
    live = _only(evidence.after_wipe.counters, is_current)
    blocked = set(filter(is_current, evidence.before_wipe.blocked))
    held = _only(end.counters, is_current)
    return (
        Promise(
            f"{len(recorded):,} counters are at least as high as in the snapshot",
            tuple(_lower(held, than=recorded, when="in the snapshot")) or _nothing(recorded),
        ),
        Promise(
            f"{len(live):,} counters are at least as high as after the wipe",
            tuple(_lower(held, than=live, when="after the wipe")) or _nothing(live),
        ),
        Promise(
            f"{len(blocked):,} blocks from before the wipe are back",
            tuple(f"{_named(each)} is not blocked" for each in _sorted(blocked - end.blocked))
            or _nothing(blocked),
        ),
        Promise(
            f"{len(held):,} counters are no higher than the true spend",
            tuple(_higher(held, than=end.spent)) or _nothing(held),
        ),
        Promise(
            "the request that was refused before the wipe is refused again",
            () if evidence.is_refused else ("it is allowed",),
        ),
    )


@dataclass(frozen=True, slots=True)
class Account:
    """The spend of some counters, in dollars, by whether a restore can know it.

    No snapshot has the spend ``between`` the snapshot and the wipe. Of the spend ``since`` the
    wipe, ``not_added`` belongs to counters with a higher value in the snapshot: the higher value
    counts, not the sum. The rest is in the counters.
    """

    between: Decimal
    since: Decimal
    not_added: Decimal

    @property
    def kept(self) -> Decimal:
        """The spend since the wipe that is in the counters."""
        return self.since - self.not_added


def account(evidence: Evidence, is_included: Callable[[CounterKey], bool]) -> Account:
    """Return the account of the included counters, all of one budget and current window.

    ``between`` and ``not_added`` together are the spend that is not in the counters.
    """
    end = evidence.at_the_end
    recorded, counted = total(evidence.snapshot, is_included), total(end.counters, is_included)
    until_wipe = total(evidence.before_wipe.spent, is_included)
    spent = total(end.spent, is_included)
    between = until_wipe - recorded
    return Account(between, spent - until_wipe, spent - counted - between)


def total(usages: Usages, is_included: Callable[[CounterKey], bool]) -> Decimal:
    """Return the usage of the included counters, all of one budget and window."""
    included = _only(usages, is_included)
    return budget_usage({counter.entity: usage for counter, usage in included.items()})


def _only(usages: Usages, is_included: Callable[[CounterKey], bool]) -> Usages:
    return {counter: usage for counter, usage in usages.items() if is_included(counter)}


def _lower(found: Usages, *, than: Usages, when: str) -> Iterator[str]:
    for counter in _sorted(than):
        usage = found.get(counter)
        if usage is None or usage < than[counter]:
            now = "is missing" if usage is None else f"is {format_usage(usage)}"
            yield f"{_named(counter)} was {format_usage(than[counter])} {when} and {now}"


def _higher(found: Usages, *, than: Usages) -> Iterator[str]:
    for counter in _sorted(found):
        spent = than.get(counter, Decimal(0))
        if found[counter] > spent:
            usage = format_usage(found[counter])
            yield f"{_named(counter)} is {usage}, but the true spend is {format_usage(spent)}"


def _nothing(compared: Collection[CounterKey]) -> tuple[str, ...]:
    return () if compared else ("there was nothing to compare",)


def _sorted(counters: Iterable[CounterKey]) -> list[CounterKey]:
    return sorted(counters, key=suffix_of)


def _named(counter: CounterKey) -> str:
    return described(suffix_of(counter))


class Page:
    """Writes the steps and the figures of the demo to a console, in at most 80 columns."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps = 0

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Write a numbered title, and at the end the duration of the step."""
        self._steps += 1
        self._console.print()
        self._console.print(Text(f"{self._steps:>2}  {title}", "bold"))
        begun = time.monotonic()
        yield
        self._write(Text(f"({time.monotonic() - begun:.1f} s)", "dim"))

    def say(self, text: str) -> None:
        """Write what has happened, in sentences."""
        self._write(Text(escape_unprintable(self._console, text)))

    def answer(self, request: str, *, is_refused: bool) -> None:
        """Write the gateway's answer to a request."""
        answer = ("REFUSED", "bold red") if is_refused else ("ALLOWED", "bold yellow")
        self._write(Text.assemble(request, " ", answer))

    def show_figures(self, evidence: Evidence) -> None:
        """Write the figures of three times in columns, amounts with all their digits."""
        times = (evidence.before_wipe, evidence.after_wipe, evidence.at_the_end)
        table = Table(box=None, padding=(0, 0, 0, 2), pad_edge=False, header_style="bold")
        table.add_column("")
        for name in ("before wipe", "after wipe", "after restore"):
            table.add_column(name, justify="right")

        def row(name: str, figure: Callable[[Figures], str]) -> None:
            table.add_row(name, *map(figure, times))

        of_agent = counter_of_entity(AGENT)
        row("Counters", lambda each: f"{len(each.counters):,}")
        row("Blocked", lambda each: f"{len(each.blocked):,}")
        row(
            f"Usage of {BUDGET!r} of {TENANT!r}, $",
            lambda each: _exact(total(each.counters, is_of_the_budget)),
        )
        row(
            f"  {AGENT}, limit {LIMIT}",
            lambda each: _exact(each.counters.get(of_agent, Decimal(0))),
        )
        row(
            "True spend in the ledger, $",
            lambda each: _exact(total(each.spent, is_of_the_budget)),
        )
        self._console.print()
        self._console.print(table)

    def show_account(self, account: Account, reported: LossAmounts | None) -> None:
        """Write which spend no restore can know, which was not added, and which was kept.

        ``reported`` is what the incident knows of it, without the ledger.
        """
        self._console.print()
        self._console.print(Text(f"Spend from budget {BUDGET!r} of {TENANT!r}", "bold"))
        self._write_amount(
            account.between, "between snapshot and wipe: not recovered, it is in no snapshot"
        )
        self._write_amount(
            account.not_added,
            "counted after the wipe and not added: the higher value counts, never the sum",
        )
        self._write_amount(account.kept, "after the wipe, in the counters: kept")
        if reported is not None:
            restored, not_added = _exact(reported.restored), _bounded_dollars(reported)
            self.say(f"The incident reports ${restored} as restored, and {not_added} as not added.")

    def _write_amount(self, amount: Decimal, what: str) -> None:
        self._write(Text(what), Text(f"${_exact(amount)}  ".rjust(_AMOUNT)))

    def show_verdict(self, promises: Sequence[Promise], seconds: float) -> None:
        """Write which promises hold, and the verdict."""
        self._console.print()
        for promise in promises:
            mark = Text("  ok  ", "green") if promise.is_kept else Text("  no  ", "bold red")
            self._write(Text(promise.text), mark)
            broken = list(promise.broken[:_MOST_NAMED])
            if len(promise.broken) > _MOST_NAMED:
                broken.append(f"and {len(promise.broken) - _MOST_NAMED:,} more")
            for each in broken:
                self._write(Text(escape_unprintable(self._console, each)), Text(_BROKEN_MARGIN))
        self._console.print()
        verdict = (
            ("Everything in the snapshot came back.", "bold green")
            if all(promise.is_kept for promise in promises)
            else ("Not everything in the snapshot came back.", "bold red")
        )
        self._console.print(Text.assemble(verdict, f" Total time: {seconds:.1f} s."))

    def _write(self, text: Text, margin: Text | None = None) -> None:
        print_wrapped(self._console, margin or Text(" " * _MARGIN), text, widest=_WIDEST)


def _bounded_dollars(amounts: LossAmounts) -> str:
    """Write what is not added, with what is known of it."""
    if amounts.counted is None:
        return "an unknown amount"
    bound = "" if amounts.bound is Bound.EXACT else f"{label(amounts.bound)} "
    return f"{bound}${_exact(amounts.counted)}"


def _exact(amount: Decimal) -> str:
    text = format_usage(amount)
    return text if len(text.partition(".")[2]) > _DECIMALS else f"{amount:.{_DECIMALS}f}"


def run_story(stage: Stage, page: Page) -> Evidence:
    """Lose the store and restore it, and return the figures that were read meanwhile.

    Raises:
        DemoError: the demo could not reach its end.
        BudgetRecoveryError: a service failed.
    """
    # No setting of the environment is used: it may name other servers.
    settings = Settings.model_construct(
        nats_url=SecretStr(stage.gateway.place.url),
        postgres_url=SecretStr(stage.database_url),
        bucket=stage.gateway.place.bucket,
    )
    with opened_control_plane(settings) as plane:
        return _Story(stage.gateway, plane, settings, stage.database_url, page).run()


@dataclass(frozen=True, slots=True)
class _Story:
    gateway: DemoGateway
    plane: ControlPlane
    settings: Settings
    database_url: str
    page: Page

    def run(self) -> Evidence:
        self._run_traffic()
        with self.page.step("Take a snapshot"):
            taken = self._capture()
            counters = sum(tenant.entries for tenant in taken.stored)
            self.page.say(
                f"{counters:,} counters of {len(taken.stored)} tenants are copied to PostgreSQL."
                " Dagster does this every hour; the demo runs the same code without Dagster."
            )
        self._exhaust_budget()
        with self.page.step("Take the next snapshot, as an hour later"):
            newest = self._capture()
            snapshot = _read_snapshot(self.database_url, newest.captured_at)
            self.page.say(
                f"It records that {AGENT} has spent {_dollars(snapshot[counter_of_entity(AGENT)])}."
                " Traffic continues; spend from here on is in no snapshot."
            )
            time.sleep(_TRAFFIC_SECONDS)
        before_wipe = self._wipe()
        after_wipe = self._spend_again()
        with self.page.step("Check the store"):
            incident = self._find_loss()
            self.page.say(
                f"Dagster does this every ten minutes. The check finds: {incident.losses[0].reason}"
                f" It opens incident {incident.short_id} and pauses snapshots."
            )
        with self.page.step("Restore the counters, while traffic continues"):
            is_recovered, detail = self._recover()
            if is_recovered:
                self.page.say(
                    "Each counter is raised to its highest value in the snapshots. No counter is"
                    " lowered, and no values are summed."
                )
            self.page.say(detail)
        is_refused = self._wait_for_blocks(before_wipe, is_recovered=is_recovered)
        reported = self.plane.audits.amounts_of(incident.incident_id, TENANT)
        return Evidence(
            snapshot,
            before_wipe,
            after_wipe,
            self.gateway.figures(),
            is_refused,
            reported.get(counter_of_entity(AGENT).of),
        )

    def _run_traffic(self) -> None:
        with self.page.step("Run traffic"):
            time.sleep(_TRAFFIC_SECONDS)
            figures = self.gateway.figures()
            tenants = len({counter.tenant for counter in figures.counters})
            self.page.say(
                f"A simulated AI gateway serves {tenants} tenants. It adds up the cost of their"
                f" requests in {len(figures.counters):,} counters in NATS, and blocks every entity"
                f" that has used up its budget: {len(figures.blocked)} so far."
            )
            self.page.say(
                f"Budget {BUDGET!r} of tenant {TENANT!r} allows each agent {_dollars(LIMIT)};"
                f" {AGENT} has spent {_dollars(figures.counters[counter_of_entity(AGENT)])}."
            )

    def _exhaust_budget(self) -> None:
        with self.page.step("Use up a budget"):
            requests = self.gateway.spend_until_refused()
            spent = self.gateway.figures().counters[counter_of_entity(AGENT)]
            self.page.say(
                f"After {requests} requests of {_dollars(REQUEST.cost)} {AGENT} has spent"
                f" {_dollars(spent)}, and the gateway blocks it."
            )
            self._show_answer(is_refused=True)

    def _wipe(self) -> Figures:
        with self.page.step("Wipe the store"):
            before_wipe, seconds = self.gateway.figures_and_wipe()
            self.page.say(
                "Its stream is deleted, as an operator might lose it. The gateway creates an empty"
                f" one after {seconds:.1f} s. Nothing fails, and nothing raises an alarm."
            )
        return before_wipe

    def _spend_again(self) -> Figures:
        with self.page.step("Spend again from the exhausted budget"):
            if not self.gateway.wait_for_answer(is_refused=False):
                raise DemoError(
                    "The gateway still refuses the request, although its store was wiped.",
                    "run it again; the machine may be too busy for the simulated gateway.",
                )
            self._show_answer(is_refused=self.gateway.refuses())
            self.gateway.spend(NEWCOMER, "1")
            time.sleep(_TRAFFIC_SECONDS)
            figures = self.gateway.figures()
            usage = figures.counters.get(counter_of_entity(AGENT), Decimal(0))
            self.page.say(
                f"Usage counts from zero: the counter of {AGENT} shows {_dollars(usage)}, and"
                f" {len(figures.blocked)} entities are blocked. {NEWCOMER}, which is in no"
                f" snapshot, spends its first"
                f" {_dollars(figures.counters[counter_of_entity(NEWCOMER)])}."
            )
        return figures

    def _wait_for_blocks(self, before_wipe: Figures, *, is_recovered: bool) -> bool:
        """Wait until the blocks are back, send the request, and return whether it is refused."""

        def are_back() -> bool:
            now = self.gateway.figures()
            missing = before_wipe.blocked - now.blocked
            return not any(each.of.window.is_current(now.at) for each in missing)

        with self.page.step("Send the request once more"):
            # Without a restore there is nothing to wait for.
            if is_recovered and self.gateway.wait_for_answer(is_refused=True):
                poll(are_back, seconds=_BLOCKS_SECONDS)
                self.page.say("The gateway derives the blocks from the restored counters.")
            is_refused = self.gateway.refuses()
            self._show_answer(is_refused=is_refused)
        return is_refused

    def _show_answer(self, *, is_refused: bool) -> None:
        request = f"{AGENT} requests {_dollars(REQUEST.cost)} more:"
        self.page.answer(request, is_refused=is_refused)

    def _capture(self) -> Captured:
        """Capture every tenant into the current hour, or into the next if that closes meanwhile."""
        for _ in range(_TRIES):
            hour = Hour.containing(self.plane.clock.now())
            captured = self._capture_hour(hour)
            if isinstance(captured, Captured) and not (captured.failed or captured.stopped_by):
                return captured
            if not hour.is_past(self.plane.clock.now()):
                break
        raise DemoError(f"The snapshot is not stored: {_why_not(captured)}", "run it again.")

    def _capture_hour(self, hour: Hour) -> Captured | NotCaptured:
        try:
            return capture_hour(
                self.plane,
                store_opener(self.settings),
                hour,
                source=self.settings.capture_source,
                retention=self.settings.retention,
                run_id=str(uuid4()),
                holder=_HOLDER,
                on_outcome=lambda _: None,
            )
        except (HourClosedError, HourNotCapturedError) as error:
            return error

    def _find_loss(self) -> Incident:
        """Check the store, again if the verdict is unknown, and return the incident."""
        checked = _retried(
            lambda: check_store(self.plane, store_opener(self.settings), checked_by=_HOLDER),
            lambda result: result.check.verdict is Verdict.UNKNOWN,
        )
        incident = checked.recovery.incident
        if incident is None:
            raise DemoError(
                f"The check does not detect the loss. {checked.check.reason}",
                checked.hint or "run it again.",
            )
        return incident

    def _recover(self) -> tuple[bool, str]:
        """Recover, again after a wait or a failed attempt; return whether it succeeded, and how."""
        result = _retried(
            self._try_to_recover, lambda each: isinstance(each, StillWaiting | AttemptFailedError)
        )
        match result:
            case Recovered(incident=incident):
                return True, incident.ended.detail if incident.ended else ""
            case GaveUp(detail=detail):
                return False, f"The restore gave up. {detail}"
            case StillWaiting(reason=reason) | NothingToDo(reason=reason):
                return False, f"Nothing is restored. {reason}"
            case AttemptFailedError(message=message):
                return False, message

    def _try_to_recover(self) -> RecoveryResult | AttemptFailedError:
        try:
            return recover_store(
                self.plane,
                store_opener(self.settings),
                run_id=str(uuid4()),
                holder=_HOLDER,
                convergence_timeout=self.settings.convergence_timeout,
                on_progress=lambda _: None,
            )
        except AttemptFailedError as error:
            return error


def _retried(work: Callable[[], Found], must_retry: Callable[[Found], bool]) -> Found:
    """Do the work, again while its result demands it and tries are left; return the last result."""
    for _ in range(_TRIES - 1):
        if not must_retry(result := work()):
            return result
        time.sleep(_RETRY_SECONDS)
    return work()


def _why_not(captured: Captured | NotCaptured) -> str:
    match captured:
        case Captured(stopped_by=None, failed=failed) if failed:
            return f"of tenant {failed[0].tenant!r}, {failed[0].reason}"
        case Captured(stopped_by=error):
            return str(error)
        case Paused(state=state):
            return f"the store is {state.name}."
        case Verified(hour=hour):
            return f"the hour {hour} closed."
        case HourClosedError() | HourNotCapturedError():
            return captured.message


def _read_snapshot(database_url: str, captured_at: datetime) -> Usages:
    """Read the stored snapshot of all tenants with this timestamp."""
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(_SNAPSHOT, (captured_at,)).fetchall()
    return {
        CounterKey(tenant, BudgetWindow(budget, Window.parse(token)), entity): usage
        for tenant, budget, token, entity, usage in rows
    }


def _dollars(amount: Decimal) -> str:
    return f"${amount:,.2f}"
