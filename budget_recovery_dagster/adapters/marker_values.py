"""Our marker in the bucket: its key, its value, and what is found there instead of it."""

import json

from budget_recovery_dagster.adapters.live_keys import LiveKey
from budget_recovery_dagster.adapters.nats_codec import encode_name
from budget_recovery_dagster.domain.detection import FoundMarker
from budget_recovery_dagster.errors import MarkerConflictError

GUARD = "__guard"
"""The first token of every marker's key."""

_WRITTEN_BY = "budget-recovery"


def marker_key(deployment_id: str) -> str:
    """Return the key of a deployment's marker."""
    return f"{GUARD}.{encode_name(deployment_id)}"


def marker_value(nonce: str) -> bytes:
    """Write a marker."""
    return json.dumps({"nonce": nonce, "written_by": _WRITTEN_BY}).encode()


def found_marker(live: LiveKey) -> FoundMarker | None:
    """Tell what stands under a marker's key; None: nothing that the store knows of."""
    if live.value is not None:
        nonce = None if live.value.fault is not None else _nonce(live.value.data)
        return FoundMarker(nonce, live.revision)
    return FoundMarker(None, live.revision, is_deleted=True) if live.revision else None


def _nonce(data: bytes) -> str | None:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return None
    match content:
        case {"nonce": str(nonce), "written_by": str(written_by)} if written_by == _WRITTEN_BY:
            return nonce
    return None


def marker_conflict(bucket: str, key: str, after: int) -> MarkerConflictError:
    """Say that something else stands where a marker was to be written over ``after``."""
    seen = f"what stood there at sequence {after}" if after else "nothing"
    return MarkerConflictError(
        f"{key} in the bucket {bucket} is not {seen} any more, so it was not written.",
        "look again; if it goes on, another installation uses a copy of this database.",
    )
