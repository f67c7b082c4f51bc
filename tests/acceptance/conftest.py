import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place(server_dir: Path) -> Iterator[Path]:
    """Create a directory that the account of dev's database can reach."""
    with tempfile.TemporaryDirectory(prefix="of recovery ", dir=server_dir) as directory:
        path = Path(directory)
        path.chmod(0o755)
        yield path
