"""Recording deliberate resets: a restore does not bring back usage that was reset on purpose."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from budget_recovery_dagster.domain.admission import RESTORE_LEASE
from budget_recovery_dagster.domain.counters import BudgetWindow, Entity
from budget_recovery_dagster.domain.incident import RecoveryState
from budget_recovery_dagster.domain.plan import named_tenant, tenant_text
from budget_recovery_dagster.domain.recovery_point import Everyone, Reset
from budget_recovery_dagster.errors import ChoiceError
from budget_recovery_dagster.ports import ControlPlane, OpenStore
from budget_recovery_dagster.services.check import renew_marker
from budget_recovery_dagster.services.restore.manual import require_reason

_CHOICES = 20


@dataclass(frozen=True, slots=True)
class ResetRequest:
    """A reset to record; see ``Reset``. ``at`` is aware; None means now.

    ``tenant`` names one tenant, as ``named_tenant`` reads it.
    """

    tenant: str
    budget: str
    window: str | None
    entity: Entity | Everyone
    at: datetime | None
    by: str
    reason: str


@dataclass(frozen=True, slots=True)
class RecordedReset:
    """A stored reset, and its effect.

    ``windows`` are the open windows in which it excludes recorded usage; empty if no retained
    snapshot has such usage in an open window. ``is_restoring``: a restore is running, and may have
    read its recovery point before the reset. ``unmarked`` is why our marker in the store does not
    name the reset yet, None if it does: an older copy of the database would not be recognized.
    """

    reset: Reset
    windows: tuple[BudgetWindow, ...]
    is_restoring: bool
    unmarked: str | None = None


def record_reset(
    plane: ControlPlane, request: ResetRequest, open_store: OpenStore | None
) -> RecordedReset:
    """Record that counters were lowered or cleared; no counter of the gateway is touched.

    The gateway's counters must be low by the time of the reset: what a snapshot reads later is not
    excluded. Then our marker in the store is renewed. ``open_store`` None: no store is configured;
    the next check renews it.

    Raises:
        ChoiceError: no snapshot of the tenant or budget is retained, the window does not exist,
            the time is in the future, or the reason is empty; nothing is recorded.
    """
    require_reason(request.reason)
    tenant = _retained_tenant(plane, request.tenant)
    _require_retained(plane, tenant, request.budget)
    now = plane.clock.now()
    kept = plane.resets.record(_reset(replace(request, tenant=tenant), now))
    return RecordedReset(
        reset=kept,
        windows=_windows_of(plane, kept, now),
        is_restoring=_is_restoring(plane),
        unmarked=_mark(plane, open_store, request.by),
    )


def _is_restoring(plane: ControlPlane) -> bool:
    """Whether a restore is at work, also of a store without an incident, or starts soon."""
    if plane.leases.state_of(RESTORE_LEASE).holder is not None:
        return True
    recovery = plane.incidents.recovery()
    is_held = recovery.incident is not None and recovery.incident.is_held
    return recovery.state is RecoveryState.RECOVERING and not is_held


def _mark(plane: ControlPlane, open_store: OpenStore | None, by: str) -> str | None:
    """Renew our marker, so that it names the reset; return why that failed, None if it did not."""
    if open_store is None:
        return "No NATS server is configured."
    return renew_marker(plane, open_store, renewed_by=f"record-reset by {by}")


def _retained_tenant(plane: ControlPlane, text: str) -> str:
    tenants, tenant = plane.points.tenants(), named_tenant(text)
    if tenant is not None and tenant in tenants:
        return tenant
    raise ChoiceError(
        f"No snapshot of tenant {tenant!r} is retained."
        if tenant is not None
        else f"A reset is of one tenant, but tenant {text!r} stands for all.",
        _choose("the tenants", map(tenant_text, tenants)),
    )


def _require_retained(plane: ControlPlane, tenant: str, budget: str) -> None:
    budgets = plane.snapshots.budgets_of(tenant)
    if budget not in budgets:
        raise ChoiceError(
            f"No snapshot of budget {budget!r} of tenant {tenant!r} is retained.",
            _choose("its budgets", budgets),
        )


def _windows_of(plane: ControlPlane, reset: Reset, now: datetime) -> tuple[BudgetWindow, ...]:
    point = plane.points.point_of(reset.tenant, now)
    windows = () if point is None else point.windows
    return tuple(
        window.of
        for window in windows
        if window.of.window.is_current(now) and reset in window.resets
    )


def _reset(request: ResetRequest, now: datetime) -> Reset:
    """Return the reset; one in the future would exclude usage that is still to come."""
    at = request.at or now
    if at > now:
        raise ChoiceError(
            f"The time of the reset is in the future: {at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC;"
            f" it is {now:%Y-%m-%d %H:%M:%S} UTC.",
            "lower the counters first, then record the reset.",
        )
    try:
        return Reset(
            tenant=request.tenant,
            budget=request.budget,
            window=request.window,
            entity=request.entity,
            at=at,
            by=request.by,
            reason=request.reason,
            recorded_at=now,
        )
    except ValueError as error:
        raise ChoiceError(
            f"No such reset can be recorded: {error}.", "correct the entity or the window."
        ) from error


def _choose(of: str, names: Iterable[str]) -> str:
    known = sorted(names)
    if not known:
        return "take a snapshot first; no tenant has one."
    more = f" and {len(known) - _CHOICES:,} more" if len(known) > _CHOICES else ""
    return f"choose one of {of}: {', '.join(map(repr, known[:_CHOICES]))}{more}."
