import traceback
from pathlib import Path

import nkeys  # type: ignore[import-untyped]  # it ships none
import pytest

from budget_recovery_dagster.adapters.nats import (
    ServerAddress,
    open_access,
    parse_server,
    read_credentials,
)
from budget_recovery_dagster.errors import SettingsError

SEED = bytes(nkeys.encode_seed(b"0" * 32, nkeys.PREFIX_BYTE_USER)).decode()
JWT_PART = "-----BEGIN NATS USER JWT-----\nheader.claims.signature\n------END NATS USER JWT------\n"
SEED_PART = f"-----BEGIN USER NKEY SEED-----\n{SEED}\n------END USER NKEY SEED------\n"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("nats://host:4333", ServerAddress("nats://host:4333", needs_tls=False)),
        ("nats://host", ServerAddress("nats://host:4222", needs_tls=False)),
        ("host", ServerAddress("nats://host:4222", needs_tls=False)),
        ("host:1", ServerAddress("nats://host:1", needs_tls=False)),
        ("tls://host/", ServerAddress("tls://host:4222", needs_tls=True)),
        ("nats://[::1]:5", ServerAddress("nats://[::1]:5", needs_tls=False)),
        (
            "nats://me:p%40ss%2F%25@host",
            ServerAddress("nats://host:4222", needs_tls=False, user="me", password="p@ss/%"),
        ),
        ("nats://t0ken@host", ServerAddress("nats://host:4222", needs_tls=False, token="t0ken")),
    ],
)
def test_a_server_url_is_parsed(url: str, address: ServerAddress) -> None:
    assert parse_server(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nats://",
        "http://me:s3cret@host",
        "ws://me:s3cret@host",
        "nats://me:s3cret@host:port",
        "nats://me:s3cret@host:99999",
        "nats://me:s3cret/more@host",
        "nats://me:s3cret#more@host",
        "nats://me:s3cret?more@host",
        "nats://me:s3cret[@host",
        "nats://me:s3cret\N{FULLWIDTH COMMERCIAL AT}x@host",
        "nats://me:s3cret@host/path",
    ],
)
def test_an_invalid_url_is_rejected_without_showing_its_password(url: str) -> None:
    with pytest.raises(SettingsError, match="The NATS URL") as caught:
        open_access(f"nats://first,{url}", None, None)
    assert "BUDGET_RECOVERY_NATS_URL" in caught.value.hint
    assert "s3cret" not in str(caught.value)
    message = "".join(traceback.format_exception_only(caught.value))
    causes = "".join(
        traceback.format_exception(caught.value.__cause__) if caught.value.__cause__ else []
    )
    assert "s3cret" not in message + causes
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_an_access_shows_its_servers_and_no_secret() -> None:
    access = open_access("nats://me:s3cret@one, tls://t0ken@two", None, None)
    assert str(access) == "nats://one:4222, tls://two:4222"
    assert "s3cret" not in repr(access)
    assert "t0ken" not in repr(access)


def test_credentials_are_read(tmp_path: Path) -> None:
    path = tmp_path / "user.creds"
    path.write_text(JWT_PART + SEED_PART)
    assert read_credentials(path) == JWT_PART + SEED_PART


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "The NATS credentials {path} contain no NATS USER JWT."),
        (JWT_PART.encode(), "The NATS credentials {path} contain no USER NKEY SEED."),
        (SEED_PART.encode(), "The NATS credentials {path} contain no NATS USER JWT."),
        (
            JWT_PART.encode() + b"-----BEGIN USER NKEY SEED-----",
            "The NATS credentials {path} contain no USER NKEY SEED.",
        ),
        (
            (JWT_PART + SEED_PART.replace(SEED, "SUAB")).encode(),
            "The NATS credentials {path} contain an invalid seed.",
        ),
        (
            (JWT_PART + SEED_PART.replace(SEED, "?")).encode(),
            "The NATS credentials {path} contain an invalid seed.",
        ),
        (b"\xff\xfe", "Cannot read the NATS credentials {path}: not a text file."),
    ],
)
def test_an_invalid_credentials_file_is_rejected(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "user.creds"
    path.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        open_access("host", path, None)
    assert caught.value.message == reason.format(path=path)
    assert SEED not in str(caught.value)


def test_the_error_names_a_missing_file(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(
        SettingsError, match=f"Cannot read the NATS credentials {missing}: No such file"
    ):
        open_access("host", missing, None)
    with pytest.raises(
        SettingsError, match=f"Cannot load the certificate authority {missing}: No such file"
    ):
        open_access("host", None, missing)


def test_a_certificate_authority_must_be_valid_and_requires_tls(tmp_path: Path) -> None:
    path = tmp_path / "authority.pem"
    path.write_text("no certificate")
    with pytest.raises(SettingsError, match=f"Cannot load the certificate authority {path}: "):
        open_access("host", None, path)
    assert parse_server("nats://host", has_authority=True).needs_tls
