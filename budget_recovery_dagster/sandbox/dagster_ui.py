"""The web pages of Dagster, and the questions that can be asked behind them."""

import http.client
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from budget_recovery_dagster.sandbox.errors import DagsterUiError, PortTakenError

_TIMEOUT_SECONDS = 30
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - the address to ask instead


@dataclass(frozen=True, slots=True)
class DagsterUi:
    """The webserver at an address of this machine."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """What a browser on this machine opens."""
        host = self._reachable_host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def _reachable_host(self) -> str:
        return _EVERY_ADDRESS.get(self.host, self.host)

    def require_free(self) -> None:
        """Check that a server could take the address now.

        Raises:
            PortTakenError: it could not.
        """
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                # As the webserver does: connections that have just ended do not count.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            raise PortTakenError(
                f"The web pages cannot be served at {self.host} port {self.port}:"
                f" {error.strerror or error}.",
                "choose another --port or --host.",
            ) from error

    def is_up(self) -> bool | None:
        """Whether the webserver answers; None while it does not."""
        try:
            status, _ = self._ask("GET", "/server_info")
        except (OSError, http.client.HTTPException):
            return None
        return True if status == http.client.OK else None

    def query(self, document: str, **variables: Any) -> Mapping[str, Any]:
        """Answer a GraphQL document.

        Raises:
            DagsterUiError: there is no answer, or an error.
        """
        body = json.dumps({"query": document, "variables": variables})
        try:
            _, answer = self._ask("POST", "/graphql", body)
            content = json.loads(answer)
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise DagsterUiError(
                f"The Dagster webserver at {self.url} gave no answer: {error}.", "look at its log."
            ) from error
        if content.get("errors"):
            raise DagsterUiError(
                f"The Dagster webserver refused a question: {content['errors'][0]['message']}",
                "look at its log.",
            )
        data: Mapping[str, Any] = content["data"]
        return data

    def _ask(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(
            self._reachable_host, self.port, timeout=_TIMEOUT_SECONDS
        )
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()
