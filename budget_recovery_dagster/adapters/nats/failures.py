"""Errors of the NATS servers and the driver, as errors of this project with a hint."""

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

_AUTHENTICATION_ERROR = re.compile(
    r"authori[sz]ation violation|authentication (?:expired|revoked)", re.IGNORECASE
)
_NO_STREAM = 10059
_JETSTREAM_OFF = frozenset({10039, 10076})
_UNAVAILABLE = 503
_TEMPORARILY_UNAVAILABLE = 10008
_MESSAGE_TOO_LARGE = 10054


def connect_failed(server: ServerAddress, error: Exception) -> StoreError:
    """Return the error for a connection that could not be opened."""
    if _AUTHENTICATION_ERROR.search(str(error)):
        return user_rejected(server, error)
    if isinstance(error, errors.SecureConnWantedError):
        return StoreUnreachableError(
            f"{server.url} does not require TLS, so nothing was sent to it.",
            "configure `tls` on the NATS server, or use nats:// without a certificate authority.",
        )
    if isinstance(error, ssl.SSLError):
        return StoreUnreachableError(
            f"TLS with {server.url} failed: {error.reason or error}.",
            "set BUDGET_RECOVERY_NATS_CA to the authority that signed the server's certificate.",
        )
    return StoreUnreachableError(
        f"Cannot connect to NATS at {server.url}: {_reason(error)}.",
        "start the NATS server, or correct BUDGET_RECOVERY_NATS_URL.",
    )


def user_rejected(server: ServerAddress, error: Exception) -> StorePermissionError:
    """Return the error for a user whom a server rejects, at login or later."""
    return StorePermissionError(
        f"{server.url} rejected the NATS user: {_reason(error)}.",
        "correct the user and password in BUDGET_RECOVERY_NATS_URL, or renew the credentials file.",
    )


def credentials_expired(
    server: ServerAddress, file: Path | None, expired_at: datetime
) -> StorePermissionError:
    """Return the error for a user whose credentials have expired; times are in UTC."""
    return StorePermissionError(
        f"{server.url} rejected the NATS user: the credentials {file} expired at"
        f" {expired_at:%Y-%m-%d %H:%M:%S} UTC.",
        "renew the credentials file of BUDGET_RECOVERY_NATS_CREDS; no restart is needed.",
    )


def permission_denied(action: str) -> StorePermissionError:
    """Return the error for an action that the NATS user has no permission for."""
    return StorePermissionError(
        f"The NATS user may not {action}.",
        "grant it; docs/operations.md lists the permissions that the user needs.",
    )


def connection_lost(server: ServerAddress, cause: Exception | None) -> StoreError:
    """Return the error for an established connection that was lost."""
    if cause is not None and _AUTHENTICATION_ERROR.search(str(cause)):
        return user_rejected(server, cause)
    return StoreUnreachableError(
        f"Lost the connection to {server.url}: {_reason(cause) if cause else 'closed'}.",
        "check the NATS server; the next call reconnects.",
    )


def jetstream_off(bucket: str) -> StoreError:
    """Return the error for a server or account without JetStream."""
    return StoreUnreachableError(
        f"JetStream is not enabled, so the bucket {bucket} is not available.",
        "enable JetStream on the NATS server and for the account of the NATS user.",
    )


def jetstream_error(bucket: str, error: Mapping[str, Any]) -> StoreError:
    """Return the error for an error response of JetStream."""
    code, number = error.get("code"), error.get("err_code")
    description = _describe(error)
    if number == _NO_STREAM:
        return StoreMissingError(
            f"The bucket {bucket} does not exist.",
            "correct BUDGET_RECOVERY_BUCKET, or start the gateway, which creates the bucket.",
        )
    if number in _JETSTREAM_OFF:
        return jetstream_off(bucket)
    if code == _UNAVAILABLE:
        return StoreNoQuorumError(
            f"JetStream cannot serve the bucket {bucket}: {description}.",
            "restore a quorum of NATS servers, then wait for a leader.",
        )
    return StoreReadError(
        f"JetStream rejected a request for the bucket {bucket}: {description}.",
        "check the log of the NATS server.",
    )


def write_error(bucket: str, key: str, error: Mapping[str, Any]) -> StoreError:
    """Return the error for a rejected write, other than a revision conflict."""
    number = error.get("err_code")
    if number in {_NO_STREAM, _TEMPORARILY_UNAVAILABLE} or number in _JETSTREAM_OFF:
        return jetstream_error(bucket, error)
    return StoreWriteError(
        f"The bucket {bucket} rejected the write of {key}: {_describe(error)}.",
        "check the limits of bucket and account, and the disks of the NATS servers.",
    )


def value_error(error: Mapping[str, Any]) -> str | None:
    """Return why JetStream never stores this value; None if the error has another cause."""
    return _describe(error) if error.get("err_code") == _MESSAGE_TOO_LARGE else None


def no_stream_accepts_writes(bucket: str) -> StoreError:
    """Return the error for a write that no server received."""
    return StoreNoQuorumError(
        f"No stream accepts writes to the bucket {bucket}.",
        "check that the bucket exists, then wait until its stream has a leader.",
    )


def too_large(subject: str, size: int, limit: int) -> StoreWriteError:
    """Return the error for a message for which the server would close the connection."""
    return StoreWriteError(
        f"{size} bytes for {subject} exceed the server's max_payload: {limit} with headers.",
        "raise max_payload on the NATS servers, or find out why the value is so large.",
    )


def _describe(error: Mapping[str, Any]) -> str:
    return f"{error.get('description', 'no description')} ({error.get('err_code')})"


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, OSError) and error.strerror:
        # asyncio replaces the system's text by an address; resolver errors are negative.
        number = error.errno or 0
        return os.strerror(number) if number > 0 else error.strerror
    return str(error).removeprefix("nats: ").strip("'") or type(error).__name__
