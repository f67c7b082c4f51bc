"""What the NATS servers and their driver report, told apart for an operator."""

import os
import re
import ssl
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from nats import errors

from budget_recovery_dagster.adapters.nats.address import ServerAddress
from budget_recovery_dagster.errors import (
    StoreError,
    StoreMissingError,
    StoreNoQuorumError,
    StorePermissionError,
    StoreReadError,
    StoreUnreachableError,
    StoreWriteError,
)

_REFUSED = re.compile(
    r"authori[sz]ation violation|authentication (?:expired|revoked)", re.IGNORECASE
)
_NO_STREAM = 10059
_JETSTREAM_OFF = frozenset({10039, 10076})
_UNAVAILABLE = 503
_TEMPORARILY_UNAVAILABLE = 10008
_MESSAGE_TOO_LARGE = 10054


def not_connected(server: ServerAddress, error: Exception) -> StoreError:
    """Say why a server could not be connected to."""
    if _REFUSED.search(str(error)):
        return user_refused(server, error)
    if isinstance(error, errors.SecureConnWantedError):
        return StoreUnreachableError(
            f"{server.url} does not demand TLS, so nothing was sent to it.",
            "set `tls` on the NATS server, or use nats:// and no certificate authority.",
        )
    if isinstance(error, ssl.SSLError):
        return StoreUnreachableError(
            f"TLS with {server.url} failed: {error.reason or error}.",
            "set BUDGET_RECOVERY_NATS_CA to the authority that signed the server's certificate.",
        )
    return StoreUnreachableError(
        f"NATS at {server.url} cannot be reached: {_reason(error)}.",
        "start the NATS server, or correct BUDGET_RECOVERY_NATS_URL.",
    )


def user_refused(server: ServerAddress, error: Exception) -> StorePermissionError:
    """Say that a server does not let the user in, or not any longer."""
    return StorePermissionError(
        f"{server.url} refuses the NATS user: {_reason(error)}.",
        "correct the user and password in BUDGET_RECOVERY_NATS_URL, or renew the credentials file.",
    )


def credentials_expired(
    server: ServerAddress, file: Path | None, expired_at: datetime
) -> StorePermissionError:
    """Say that a server does not let the user in because its credentials have expired."""
    return StorePermissionError(
        f"{server.url} refuses the NATS user: the credentials {file} expired at"
        f" {expired_at:%Y-%m-%d %H:%M:%S} UTC.",
        "renew the credentials file that BUDGET_RECOVERY_NATS_CREDS names; no restart is needed.",
    )


def denied(what: str) -> StorePermissionError:
    """Say what it is that the user may not do."""
    return StorePermissionError(
        f"The NATS user may not {what}.",
        "grant it to the NATS user; docs/operations.md lists those that are needed.",
    )


def broken(server: ServerAddress, cause: Exception | None) -> StoreError:
    """Say why a connection that was established is there no more."""
    if cause is not None and _REFUSED.search(str(cause)):
        return user_refused(server, cause)
    return StoreUnreachableError(
        f"The connection to {server.url} broke: {_reason(cause) if cause else 'it was closed'}.",
        "see whether the NATS server is healthy; the next call connects anew.",
    )


def jetstream_off(bucket: str) -> StoreError:
    """Say that nobody there speaks JetStream."""
    return StoreUnreachableError(
        f"JetStream, which holds the bucket {bucket}, is not enabled there.",
        "enable jetstream on the NATS server and for the account of this NATS user.",
    )


def refused_by_jetstream(bucket: str, error: Mapping[str, Any]) -> StoreError:
    """Turn an error that JetStream answered with into ours."""
    code, number = error.get("code"), error.get("err_code")
    said = _said(error)
    if number == _NO_STREAM:
        return StoreMissingError(
            f"The bucket {bucket} does not exist.",
            "correct BUDGET_RECOVERY_BUCKET, or let the gateway create its bucket.",
        )
    if number in _JETSTREAM_OFF:
        return jetstream_off(bucket)
    if code == _UNAVAILABLE:
        return StoreNoQuorumError(
            f"JetStream cannot serve the bucket {bucket}: {said}.",
            "bring back enough NATS servers for a quorum, then wait for a leader.",
        )
    return StoreReadError(
        f"JetStream refused a request about the bucket {bucket}: {said}.",
        "see the log of the NATS server.",
    )


def refused_write(bucket: str, key: str, error: Mapping[str, Any]) -> StoreError:
    """Turn an error that JetStream answered a writing with into ours; not that of a conflict."""
    number = error.get("err_code")
    if number in {_NO_STREAM, _TEMPORARILY_UNAVAILABLE} or number in _JETSTREAM_OFF:
        return refused_by_jetstream(bucket, error)
    return StoreWriteError(
        f"The bucket {bucket} refuses to store {key}: {_said(error)}.",
        "see the limits of the bucket and the account, and the disk of the NATS servers.",
    )


def refused_value(error: Mapping[str, Any]) -> str | None:
    """Say why JetStream never stores such a value; None where the refusal is not for its sake."""
    return _said(error) if error.get("err_code") == _MESSAGE_TOO_LARGE else None


def nobody_writes(bucket: str) -> StoreError:
    """Say that no server took a writing."""
    return StoreNoQuorumError(
        f"Nobody takes what is written into the bucket {bucket}.",
        "see whether the bucket exists, then wait for its stream to have a leader.",
    )


def too_large(subject: str, size: int, limit: int) -> StoreWriteError:
    """Say that the server would cut off whoever sends so much."""
    return StoreWriteError(
        f"{size} bytes for {subject} are more than the NATS server takes, {limit} with headers.",
        "raise max_payload on the NATS servers, or see why the value has become so large.",
    )


def _said(error: Mapping[str, Any]) -> str:
    return f"{error.get('description', 'no description')} ({error.get('err_code')})"


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        # asyncio puts an address in place of what the system says; resolvers count below zero.
        number = error.errno or 0
        return os.strerror(number) if number > 0 else error.strerror
    return str(error).removeprefix("nats: ").strip("'") or type(error).__name__
