"""Writing our marker into the store, so that no crash on the way looks like a loss.

First a nonce is noted as intended, then it is written on the condition that the known marker stands
there, then it is accepted. Whoever looks in between finds the old marker or the intended one, and
both are known. A nonce that was not accepted yet is written again, so one at most is outstanding.
"""

from dataclasses import dataclass, replace
from datetime import datetime
from secrets import token_hex

from budget_recovery_dagster.domain.detection import Sighting
from budget_recovery_dagster.domain.identity import Baseline, Marker, StoreIdentity
from budget_recovery_dagster.errors import MarkerConflictError
from budget_recovery_dagster.restore_ports import RecoverableStore

_NONCE_BYTES = 16


def new_nonce() -> str:
    """Return a nonce that no other marker has."""
    return token_hex(_NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class MarkerWriting:
    """Renews the marker of one deployment in an opened store."""

    store: RecoverableStore
    deployment_id: str

    def renew(self, accepted: Baseline, seen: Sighting, now: datetime) -> Baseline:
        """Write the intended marker and return the baseline that holds with it, to be accepted.

        ``seen`` is a look at the store that was found to be the ``accepted`` one at ``now``.

        Raises:
            MarkerConflictError: somebody has written the marker's key since the look.
            StorePermissionError: the marker may not be written.
            StoreWriteError: the store refuses it.
            StoreError: whether it was written is not known.
        """
        if accepted.intended is None:
            raise ValueError("a marker is written once its nonce is noted as intended")
        marker = self._write(accepted.intended, after=seen.marker.revision if seen.marker else 0)
        # The store gave out the marker's sequence after everything that was seen.
        newest = max(seen.identity.last_sequence, marker.revision)
        return replace(
            accepted,
            identity=StoreIdentity(seen.identity.created_at, newest),
            marker=marker,
            marked_at=now,
            intended=None,
        )

    def _write(self, nonce: str, *, after: int) -> Marker:
        try:
            return self.store.write_marker(self.deployment_id, nonce, after=after)
        except MarkerConflictError:
            found = self.store.look(self.deployment_id).marker
            if found is None or found.nonce != nonce or found.revision <= after:
                raise
            # The same nonce, from another try or from one whose answer was lost.
            return Marker(nonce, found.revision)
