"""Server addresses and credentials: the settings are checked before anything is sent.

Parsing removes the password from the URL first, so no message, log or traceback can contain one.
"""

import base64
import json
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nkeys  # type: ignore[import-untyped]  # no type hints

from budget_recovery_dagster.errors import SettingsError

_DEFAULT_PORT = 4222
_SCHEMES = ("nats", "tls")
_URL_HINT = (
    "set BUDGET_RECOVERY_NATS_URL to a URL such as nats://host:4222 or tls://user:password@host;"
    " separate servers by commas and write special characters of the password as %XX."
)
_JWT_HEADER = "BEGIN NATS USER JWT"
_SEED_HEADER = "BEGIN USER NKEY SEED"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """One server: ``url`` contains no user or password and is safe to show."""

    url: str
    needs_tls: bool
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Access:
    """Servers, credentials and TLS of a connection; ``open_access`` checks and creates it."""

    servers: tuple[ServerAddress, ...]
    credentials: Path | None
    tls: ssl.SSLContext

    def __str__(self) -> str:
        return ", ".join(server.url for server in self.servers)


def open_access(url: str, credentials: Path | None, certificate_authority: Path | None) -> Access:
    """Check the settings of a connection.

    Raises:
        SettingsError: a setting is invalid; the message names it and contains no password.
    """
    servers = tuple(
        parse_server(part.strip(), has_authority=certificate_authority is not None)
        for part in url.split(",")
    )
    if credentials is not None:
        read_credentials(credentials)
    return Access(servers, credentials, _tls_context(certificate_authority))


def parse_server(url: str, *, has_authority: bool = False) -> ServerAddress:
    """Parse the URL of one server.

    Raises:
        SettingsError: the URL is invalid; the message gives the reason and does not show the URL.
    """
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        host, port = parts.hostname, parts.port or _DEFAULT_PORT
    except ValueError:
        # Python's own error quotes the text that it could not parse, which may be a password.
        raise SettingsError("The NATS URL is invalid.", _URL_HINT) from None
    if parts.scheme not in _SCHEMES:
        raise SettingsError(f"The NATS URL has the unsupported scheme {parts.scheme!r}.", _URL_HINT)
    if not host:
        raise SettingsError("The NATS URL has no host.", _URL_HINT)
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise SettingsError("The NATS URL has a path, query or fragment.", _URL_HINT)
    user = None if parts.username is None else unquote(parts.username)
    password = None if parts.password is None else unquote(parts.password)
    shown_host = f"[{host}]" if ":" in host else host
    return ServerAddress(
        url=f"{parts.scheme}://{shown_host}:{port}",
        # A configured authority implies TLS: a server without TLS is then not the expected one.
        needs_tls=parts.scheme == "tls" or has_authority,
        user=user if password is not None else None,
        password=password,
        token=user if password is None else None,
    )


def read_credentials(path: Path) -> str:
    """Read and check a credentials file.

    Raises:
        SettingsError: the file is unreadable or incomplete. With an incomplete file the driver
            would search for the missing part forever.
    """
    hint = "set BUDGET_RECOVERY_NATS_CREDS to the .creds file that nsc created for the NATS user."
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise SettingsError(f"Cannot read the NATS credentials {path}: {reason}.", hint) from error
    for header in (_JWT_HEADER, _SEED_HEADER):
        if not _line_after(text, header):
            raise SettingsError(f"The NATS credentials {path} contain no {header[6:]}.", hint)
    try:
        nkeys.from_seed(bytearray(_line_after(text, _SEED_HEADER).encode())).wipe()
    except nkeys.NkeysError as error:
        raise SettingsError(
            f"The NATS credentials {path} contain an invalid seed.", hint
        ) from error
    return text


def credentials_expiry(text: str) -> datetime | None:
    """Return when credentials expire (UTC); None if they never expire or the time is unknown."""
    claims = _line_after(text, _JWT_HEADER).split(".")[1:2]
    try:
        padded = "".join(claims) + "=" * (-len("".join(claims)) % 4)
        expire_at = json.loads(base64.urlsafe_b64decode(padded))["exp"]
        return datetime.fromtimestamp(expire_at, UTC) if expire_at else None
    except (ValueError, KeyError, TypeError, OverflowError, OSError):
        return None


def _line_after(text: str, header: str) -> str:
    lines = text.splitlines()
    return next((following for line, following in pairwise(lines) if header in line), "")


def _tls_context(certificate_authority: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(
            cafile=None if certificate_authority is None else str(certificate_authority)
        )
    except OSError as error:  # includes SSLError
        raise SettingsError(
            f"Cannot load the certificate authority {certificate_authority}:"
            f" {error.strerror or error}.",
            "set BUDGET_RECOVERY_NATS_CA to a PEM file of trusted certificates.",
        ) from error
