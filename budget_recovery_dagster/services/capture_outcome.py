"""What a capture did, tenant by tenant."""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from budget_recovery_dagster.domain.counters import UnreadableKey
from budget_recovery_dagster.domain.identity import StoreIdentity
from budget_recovery_dagster.domain.moments import Hour
from budget_recovery_dagster.domain.snapshots import CaptureSource, TenantSnapshot
from budget_recovery_dagster.domain.usage_sums import exact_sum
from budget_recovery_dagster.errors import (
    BudgetRecoveryError,
    CapturesPausedError,
    ClockSkewError,
    LeaseLostError,
    PossibleLossError,
    StoreLostError,
    put_into_words,
)
from budget_recovery_dagster.ports import CaptureFailure, PruneReport, Uncaptured

# A gateway gone wrong could write any number of them; the first ones tell the kind.
MAX_NOTED_KEYS = 100


@dataclass(frozen=True, slots=True)
class TenantStored:
    """The tenant's snapshot is stored; ``seconds`` is how long the tenant took.

    ``truncated`` is how many of the records hold only the largest spenders.
    """

    tenant: str
    records: int
    truncated: int
    entries: int
    usage: Decimal
    omitted: int
    unreadable: int
    drops: int
    is_partial: bool
    seconds: float

    @classmethod
    def of(cls, snapshot: TenantSnapshot, seconds: float) -> "TenantStored":
        """Count what a stored snapshot holds."""
        return cls(
            tenant=snapshot.tenant,
            records=len(snapshot.records),
            truncated=snapshot.truncated_count,
            entries=snapshot.entry_count,
            usage=exact_sum(
                usage for record in snapshot.records for usage in record.usages.values()
            ),
            omitted=snapshot.omitted_count,
            unreadable=len(snapshot.unreadable),
            drops=len(snapshot.drops),
            is_partial=snapshot.is_partial,
            seconds=seconds,
        )


@dataclass(frozen=True, slots=True)
class TenantAbsent:
    """The tenant was read, has nothing in the store, and nothing of it is still current."""

    tenant: str
    seconds: float


@dataclass(frozen=True, slots=True)
class TenantFailed:
    """Nothing of the tenant is stored by this run.

    ``error`` is kept for the log; ``seconds`` is 0 where the tenant was not tried any more.
    """

    tenant: str
    reason: str
    hint: str
    seconds: float
    error: Exception

    @classmethod
    def because(cls, tenant: str, error: Exception, seconds: float) -> "TenantFailed":
        """Put an error into words."""
        return cls(tenant, *put_into_words(error), seconds, error)


TenantOutcome = TenantStored | TenantAbsent | TenantFailed


@dataclass(frozen=True, slots=True)
class Captured:
    """A finished capture of one hour; every tenant known or found is in ``outcomes``.

    ``stopped_by`` is what ended the capture before all tenants were tried, if anything did.
    ``unreadable`` are keys of the store that name no tenant. ``pruned`` is None where retention
    was left alone, or failed by ``prune_failure``.
    """

    hour: Hour
    captured_at: datetime
    source: CaptureSource
    identity: StoreIdentity | None
    outcomes: tuple[TenantOutcome, ...]
    unreadable: tuple[UnreadableKey, ...]
    stopped_by: BudgetRecoveryError | None
    pruned: PruneReport | None = None
    prune_failure: BudgetRecoveryError | None = None

    @property
    def stored(self) -> tuple[TenantStored, ...]:
        """The tenants whose snapshot is stored."""
        return tuple(o for o in self.outcomes if isinstance(o, TenantStored))

    @property
    def truncated(self) -> int:
        """How many of the stored records hold only the largest spenders of their budget."""
        return sum(tenant.truncated for tenant in self.stored)

    @property
    def failed(self) -> tuple[TenantFailed, ...]:
        """The tenants of which nothing is stored."""
        return tuple(o for o in self.outcomes if isinstance(o, TenantFailed))

    @property
    def may_prune(self) -> bool:
        """Whether this run may remove what is past retention."""
        return not isinstance(
            self.stopped_by,
            PossibleLossError
            | StoreLostError
            | CapturesPausedError
            | ClockSkewError
            | LeaseLostError,
        )

    @property
    def read(self) -> frozenset[str]:
        """The tenants that were read, whose old snapshots may go."""
        return frozenset(o.tenant for o in self.outcomes if not isinstance(o, TenantFailed))

    @property
    def failures(self) -> tuple[CaptureFailure, ...]:
        """What is noted in the database: the failed tenants, and keys that name no tenant."""
        tenants = (CaptureFailure(o.tenant, self.hour, o.reason, o.hint) for o in self.failed)
        keys = (
            CaptureFailure(
                bad.key,
                self.hour,
                bad.reason,
                "see which gateway wrote this key; the tenants are not affected.",
                Uncaptured.KEY,
            )
            for bad in self.unreadable[:MAX_NOTED_KEYS]
        )
        return (*tenants, *keys)
