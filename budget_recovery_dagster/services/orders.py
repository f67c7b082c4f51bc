"""What a person orders to be done to the store."""

from collections.abc import Callable
from dataclasses import dataclass

from budget_recovery_dagster.errors import ChoiceError


@dataclass(frozen=True, slots=True)
class Order:
    """Who orders something by hand, why, in which run, and who hears how it goes on.

    ``accept_unconverged``: a store is taken as it is, though its servers have not converged.
    """

    by: str
    reason: str
    run_id: str
    tell: Callable[[str], None]
    accept_unconverged: bool = False

    def require_reason(self) -> None:
        """Refuse an order that nobody would understand afterwards.

        Raises:
            ChoiceError: no reason is given.
        """
        require_reason(self.reason)


def require_reason(reason: str) -> None:
    """Refuse a reason that says nothing.

    Raises:
        ChoiceError: it is empty.
    """
    if not reason.strip():
        raise ChoiceError(
            "No reason is given.", "say why; it is kept with what is done, for whoever asks."
        )
