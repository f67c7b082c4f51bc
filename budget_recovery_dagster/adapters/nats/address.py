"""Where the NATS servers are and who connects: settings, refused by name before anything is sent.

Passwords are taken out of the URL first of all, so that no message, log or traceback can hold one.
"""

import base64
import json
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nkeys  # type: ignore[import-untyped]  # it ships none

from budget_recovery_dagster.errors import SettingsError

_DEFAULT_PORT = 4222
_SCHEMES = ("nats", "tls")
_URL_HINT = (
    "set BUDGET_RECOVERY_NATS_URL to a form such as nats://host:4222 or tls://user:password@host,"
    " more servers after a comma; write special characters of a password as %XX."
)
_JWT_MARK = "BEGIN NATS USER JWT"
_SEED_MARK = "BEGIN USER NKEY SEED"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """One server: ``url`` holds no user and no password and may be shown."""

    url: str
    needs_tls: bool
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach the servers; made by ``open_access``, which checks the settings."""

    servers: tuple[ServerAddress, ...]
    credentials: Path | None
    tls: ssl.SSLContext

    def __str__(self) -> str:
        return ", ".join(server.url for server in self.servers)


def open_access(url: str, credentials: Path | None, certificate_authority: Path | None) -> Access:
    """Check the settings of a connection.

    Raises:
        SettingsError: one is wrong; the message names it and holds no password.
    """
    servers = tuple(
        parse_server(part.strip(), has_authority=certificate_authority is not None)
        for part in url.split(",")
    )
    if credentials is not None:
        read_credentials(credentials)
    return Access(servers, credentials, _tls_context(certificate_authority))


def parse_server(url: str, *, has_authority: bool = False) -> ServerAddress:
    """Read the URL of one server.

    Raises:
        SettingsError: it is not a URL of a server; the message says why without showing it.
    """
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        host, port = parts.hostname, parts.port or _DEFAULT_PORT
    except ValueError:
        # Python's own error quotes the text that it could not read, which may be a password.
        raise SettingsError("The NATS URL cannot be read.", _URL_HINT) from None
    if parts.scheme not in _SCHEMES:
        raise SettingsError(f"The NATS URL has the scheme {parts.scheme!r}.", _URL_HINT)
    if not host:
        raise SettingsError("The NATS URL names no host.", _URL_HINT)
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise SettingsError("The NATS URL goes on after the host and port.", _URL_HINT)
    user = None if parts.username is None else unquote(parts.username)
    password = None if parts.password is None else unquote(parts.password)
    shown_host = f"[{host}]" if ":" in host else host
    return ServerAddress(
        url=f"{parts.scheme}://{shown_host}:{port}",
        # An authority is given to be used: a server without TLS is then not the one that is meant.
        needs_tls=parts.scheme == "tls" or has_authority,
        user=user if password is not None else None,
        password=password,
        token=user if password is None else None,
    )


def read_credentials(path: Path) -> str:
    """Read a credentials file.

    Raises:
        SettingsError: it cannot be read, or holds no credentials. The driver would search an
            incomplete one for its parts for ever.
    """
    hint = "set BUDGET_RECOVERY_NATS_CREDS to a .creds file of the NATS user, as nsc makes it."
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise SettingsError(f"The NATS credentials {path} cannot be read: {reason}.", hint) from (
            error
        )
    for mark in (_JWT_MARK, _SEED_MARK):
        if not _line_after(text, mark):
            raise SettingsError(f"The NATS credentials {path} have no {mark[6:]}.", hint)
    try:
        nkeys.from_seed(bytearray(_line_after(text, _SEED_MARK).encode())).wipe()
    except nkeys.NkeysError as error:
        raise SettingsError(f"The NATS credentials {path} hold no usable seed.", hint) from error
    return text


def credentials_expiry(text: str) -> datetime | None:
    """Tell until when the content of a credentials file is valid; None: for ever, or unknown."""
    claims = _line_after(text, _JWT_MARK).split(".")[1:2]
    try:
        padded = "".join(claims) + "=" * (-len("".join(claims)) % 4)
        expire_at = json.loads(base64.urlsafe_b64decode(padded))["exp"]
        return datetime.fromtimestamp(expire_at, UTC) if expire_at else None
    except (ValueError, KeyError, TypeError, OverflowError, OSError):
        return None


def _line_after(text: str, mark: str) -> str:
    lines = text.splitlines()
    return next((following for line, following in pairwise(lines) if mark in line), "")


def _tls_context(certificate_authority: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(
            cafile=None if certificate_authority is None else str(certificate_authority)
        )
    except OSError as error:  # an SSLError is one
        raise SettingsError(
            f"The certificate authority {certificate_authority} cannot be used:"
            f" {error.strerror or error}.",
            "set BUDGET_RECOVERY_NATS_CA to a PEM file with the certificates to trust.",
        ) from error
