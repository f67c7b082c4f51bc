"""Changes of stream descriptions in the files of a stopped NATS server."""

import json
from datetime import datetime
from hashlib import sha256
from pathlib import Path

from tests.highway_hash import highway_hash


def move_creation(data_dir: Path, stream: str, created_at: datetime) -> None:
    """Change the creation time of a stream of a stopped server."""
    (description,) = data_dir.glob(f"jetstream/*/streams/{stream}/meta.inf")
    content = json.loads(description.read_text())
    # The server refuses a stream whose description does not match its checksum.
    checksum = description.with_suffix(".sum")
    key = sha256(stream.encode()).digest()
    assert highway_hash(description.read_bytes(), key).hex() == checksum.read_text()
    content["Created"] = created_at.isoformat().replace("+00:00", "Z")
    description.write_text(json.dumps(content))
    checksum.write_text(highway_hash(description.read_bytes(), key).hex())
