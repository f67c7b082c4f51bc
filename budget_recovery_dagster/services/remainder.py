"""What of the whole store is not at its recovery point, looked at before an incident ends."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from budget_recovery_dagster.errors import (
    DatabaseUnreachableError,
    LeaseLostError,
    put_into_words,
)
from budget_recovery_dagster.services.count_words import counted
from budget_recovery_dagster.services.tenants_restored import Left, TenantRestores


@dataclass(frozen=True, slots=True)
class Remainder:
    """How many counters are lower than the recovery point.

    ``unreadable`` live counters are left as they are, and of ``unsound`` windows nobody knows what
    was used: every record of them is damaged. ``unseen`` tells of tenants that may have more.
    """

    counters: int
    unreadable: int
    unsound: int
    unseen: tuple[str, ...]

    @property
    def is_nothing(self) -> bool:
        """Whether everything was seen, and nothing of it can be raised."""
        return not self.counters and not self.unseen

    def unknown(self) -> Iterator[str]:
        """Say of what it is not known whether it is all there, in sentences."""
        if self.unsound:
            unknown = counted(self.unsound, "window")
            yield f"Nothing is known of {unknown}: no record is as captured."
        if self.unreadable:
            yield f"Left as unreadable: {counted(self.unreadable, 'live counter')}."


def look_for_remainder(
    restores: TenantRestores, tenants: list[str], note: Callable[[Left], None]
) -> Remainder:
    """Look at tenants one by one; ``note`` is told of each what is left.

    Raises:
        DatabaseUnreachableError, LeaseLostError: the work was cut short.
        StoreError: nothing can be asked of the store any more.
    """
    counters, unreadable, unseen = 0, 0, []
    for tenant in tenants:
        try:
            left = restores.left_of(tenant)
            note(left)
        except (DatabaseUnreachableError, LeaseLostError):
            raise
        except Exception as error:  # noqa: BLE001 - reported by name; no tenant hides another
            restores.require_answer(error)
            unseen.append(f"Tenant {tenant!r} cannot be seen: {put_into_words(error)[0]}")
        else:
            counters += left.counters
            unreadable += left.unreadable
    return Remainder(counters, unreadable, restores.unsound, tuple(unseen))
