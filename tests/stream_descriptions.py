"""What a stopped NATS server knows of its streams, changed in its files."""

import json
from datetime import datetime
from hashlib import sha256
from pathlib import Path

from tests.highway_hash import highway_hash


def move_creation(data_dir: Path, stream: str, created_at: datetime) -> None:
    """Have a stream of a stopped server say that it was made at another time."""
    (description,) = data_dir.glob(f"jetstream/*/streams/{stream}/meta.inf")
    content = json.loads(description.read_text())
    # The server refuses a stream whose description and checksum do not fit.
    checksum = description.with_suffix(".sum")
    key = sha256(stream.encode()).digest()
    assert highway_hash(description.read_bytes(), key).hex() == checksum.read_text()
    content["Created"] = created_at.isoformat().replace("+00:00", "Z")
    description.write_text(json.dumps(content))
    checksum.write_text(highway_hash(description.read_bytes(), key).hex())
