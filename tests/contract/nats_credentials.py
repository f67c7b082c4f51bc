"""A NATS operator that issues credentials, like nsc."""

import base64
import hashlib
import json
import os
import time
from typing import Any

import nkeys  # type: ignore[import-untyped]  # it ships none


class Operator:
    """An operator with one account, which has no JetStream."""

    def __init__(self) -> None:
        self._operator = _key_pair(nkeys.PREFIX_BYTE_OPERATOR)
        self._account = _key_pair(nkeys.PREFIX_BYTE_ACCOUNT)
        self._system = _key_pair(nkeys.PREFIX_BYTE_ACCOUNT)

    @property
    def config(self) -> str:
        """Return the configuration of a server that trusts this operator."""
        limits = {"subs": -1, "conn": -1, "leaf": -1, "imports": -1, "exports": -1, "data": -1}
        limits["payload"] = -1
        accounts = {
            _public(pair): self._token(self._operator, pair, "account", {"limits": limits})
            for pair in (self._account, self._system)
        }
        operator = self._token(self._operator, self._operator, "operator", {})
        return "\n".join(
            [
                f"operator: {operator}",
                f"system_account: {_public(self._system)}",
                "resolver: MEMORY",
                "resolver_preload: " + json.dumps(accounts),
            ]
        )

    def credentials(self, *, expires_in: int) -> str:
        """Return the content of a credentials file for a new user."""
        pair, seed = _key_pair_and_seed(nkeys.PREFIX_BYTE_USER)
        rights = {"pub": {}, "sub": {}, "subs": -1, "data": -1, "payload": -1}
        token = self._token(self._account, pair, "user", rights, expires_in)
        return (
            f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
        )

    @staticmethod
    def _token(
        issuer: Any, subject: Any, kind: str, rights: dict[str, Any], expires_in: int | None = None
    ) -> str:
        now = int(time.time())
        claims: dict[str, Any] = {
            "iat": now,
            "iss": _public(issuer),
            "name": kind,
            "sub": _public(subject),
            "nats": {**rights, "type": kind, "version": 2},
        }
        if expires_in is not None:
            claims["exp"] = now + expires_in
        digest = hashlib.sha256(json.dumps(claims).encode()).digest()
        claims["jti"] = base64.b32encode(digest).decode().rstrip("=")
        signed = f"{_part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{_part(claims)}"
        return f"{signed}.{_encoded(issuer.sign(signed.encode()))}"


def _key_pair(prefix: int) -> Any:
    return _key_pair_and_seed(prefix)[0]


def _key_pair_and_seed(prefix: int) -> tuple[Any, str]:
    seed = nkeys.encode_seed(os.urandom(32), prefix)
    return nkeys.from_seed(bytearray(seed)), bytes(seed).decode()


def _public(pair: Any) -> str:
    public: str = pair.public_key.decode()
    return public


def _part(content: dict[str, Any]) -> str:
    return _encoded(json.dumps(content).encode())


def _encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")
