"""Our marker in the bucket: looked for, and written over what was seen there."""

from budget_recovery_dagster.adapters.marker_values import (
    found_marker,
    marker_conflict,
    marker_key,
    marker_value,
)
from budget_recovery_dagster.adapters.nats_failures import nobody_writes, refused_write
from budget_recovery_dagster.adapters.nats_publishing import (
    WRONG_REVISION,
    conditional_headers,
    error_of,
)
from budget_recovery_dagster.adapters.nats_stream import NO_RESPONDERS, STATUS, BucketStream
from budget_recovery_dagster.adapters.nats_ttl import NEVER
from budget_recovery_dagster.domain.detection import Sighting
from budget_recovery_dagster.domain.identity import Marker


async def look(stream: BucketStream, deployment_id: str) -> Sighting:
    """Read identity and marker from the stream's leader; raises as ``BucketStream.ask``."""
    info = await stream.info()
    live = await stream.read_key(marker_key(deployment_id))
    # Where keys may have times of their own, the marker is written to stay, whatever the age.
    keeps_for = None if info.keeps_ttl else info.keeps_for
    return Sighting(info.identity, found_marker(live), keeps_for, info.is_led)


async def write_marker(stream: BucketStream, deployment_id: str, nonce: str, after: int) -> Marker:
    """Write a marker over the sequence ``after``, and wait until it is stored.

    It outlives the age at which the bucket drops other keys, if the bucket lets it.

    Raises:
        MarkerConflictError: something else stands there; nothing was overwritten.
        StoreWriteError: the store refuses it.
        StoreUnreachableError: no answer, so it may have been written.
        StoreMissingError, StoreNoQuorumError, StorePermissionError: as they say.
    """
    info = await stream.info()
    key = marker_key(deployment_id)
    answer = await stream.connection.ask(
        f"{stream.subject_prefix}{key}",
        marker_value(nonce),
        conditional_headers(after, NEVER if info.keeps_ttl else None),
    )
    if (answer.headers or {}).get(STATUS) == NO_RESPONDERS:
        raise nobody_writes(stream.bucket)
    with stream.making_sense():
        error = error_of(answer)
    if error is None:
        return Marker(nonce, stream.sequence_in(answer))
    if error.get("err_code") in WRONG_REVISION:
        raise marker_conflict(stream.bucket, key, after)
    raise refused_write(stream.bucket, key, error)
