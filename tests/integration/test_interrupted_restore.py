"""Ctrl-C in ``restore --json``."""

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

from tests.integration.commands import PROGRAM

SECONDS = 60


def test_ctrl_c_prints_an_error_document(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(SECONDS)
        url = f"postgresql://nobody@127.0.0.1:{silent.getsockname()[1]}/x"
        environment = {
            **os.environ,
            "HOME": str(tmp_path),
            "BUDGET_RECOVERY_POSTGRES_URL": url,
            "BUDGET_RECOVERY_NATS_URL": "nats://127.0.0.1:1",
        }
        with subprocess.Popen(
            [*PROGRAM, "restore", "--reason", "x", "--yes", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        ) as restore:
            # It waits for the answer of this server, which never comes.
            connection, _ = silent.accept()
            with connection:
                connection.settimeout(SECONDS)
                assert connection.recv(1)
                restore.send_signal(signal.SIGINT)
                stdout, stderr = restore.communicate(timeout=SECONDS)
    assert restore.returncode == 130, stderr
    document = json.loads(stdout)
    assert list(document) == ["schema", "error"]
    assert document["error"]["code"] == "interrupted"
    assert "stay raised" in document["error"]["hint"]
    assert "Interrupted." in stderr
