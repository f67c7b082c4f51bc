"""The command ``budget-recovery demo``: complete, with a loss, and stopped."""

import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from budget_recovery_dagster.embedded import Account
from tests.integration.demo_command import started
from tests.integration.dev_command import NOBODY, PASSWORD
from tests.private_files import require_private

pytestmark = pytest.mark.slow

OUTPUT = [
    "ok  PostgreSQL ",
    "ok  NATS ",
    "ok  simulated gateway ",
    " 1  Run traffic",
    " 2  Take a snapshot",
    " 3  Use up a budget",
    "agent:research requests $0.50 more: REFUSED",
    " 4  Take the next snapshot",
    " 5  Wipe the store",
    " 6  Spend again from the exhausted budget",
    "agent:research requests $0.50 more: ALLOWED",
    "and 0 entities are blocked.",
    " 7  Check the store",
    "The check finds: The store was recreated; ",
    " 8  Restore the counters",
    "3 tenants. Restored: ",
    "smaller amounts. Counted after the loss and not added, because the higher value counts: ",
    "smaller amounts. Usage between the newest snapshot (",
    " 9  Send the request once more",
    "agent:research requests $0.50 more: REFUSED",
    "before wipe  after wipe  after restore",
    "Everything in the snapshot came back. Total time: ",
]


@pytest.fixture
def place(server_dir: Path) -> Iterator[Path]:
    """Create an empty TMPDIR that the account of the database can reach."""
    with tempfile.TemporaryDirectory(prefix="of demo ", dir=server_dir) as directory:
        path = Path(directory)
        path.chmod(0o755)
        yield path


def row(output: str, name: str) -> tuple[Decimal, Decimal, Decimal]:
    """Return the figures of a row: before wipe, after wipe, after restore."""
    (line,) = [line for line in output.splitlines() if line.startswith(name)]
    before, after, restored = (Decimal(each.replace(",", "")) for each in line.split()[-3:])
    return before, after, restored


def amount(output: str, text: str) -> Decimal:
    (found,) = re.findall(rf"\$([0-9.]+)  {text}", output)
    return Decimal(found)


def test_the_demo_loses_the_store_and_restores_everything(place: Path, tmp_path: Path) -> None:
    # The servers of the environment are not used.
    theirs = {
        "BUDGET_RECOVERY_NATS_URL": f"nats://me:{PASSWORD}@127.0.0.1:1",
        "BUDGET_RECOVERY_POSTGRES_URL": f"postgresql://me:{PASSWORD}@127.0.0.1:1/none",
        "BUDGET_RECOVERY_DATA_DIR": str(tmp_path / "data"),
        "BUDGET_RECOVERY_RETENTION_DAYS": "nonsense",
    }
    with started(place, tmp_path / "output.txt", environment=theirs) as demo:
        assert demo.wait() == 0, demo.text
    assert len(demo.owned) > 2
    assert demo.sockets
    demo.require_no_leftovers()
    assert not [*place.iterdir(), *(tmp_path / "data").glob("*")]
    output = demo.text
    at, words = 0, " ".join(output.split())
    for text in OUTPUT:
        at = words.find(" ".join(text.split()), at)
        assert at >= 0, f"{text!r} is missing, or not in its place:\n{output}"
    # Only a tenant's name is not.
    assert {each for each in output if not each.isascii()} <= set("東京")
    assert all(line == line.rstrip() for line in output.splitlines())
    assert all(len(line) <= 80 or str(place) in line for line in output.splitlines())
    assert "  no  " not in output
    # The documentation promises about a minute; an idle machine needs a third of that.
    assert float(output.rpartition("Total time: ")[2].split()[0]) < 90

    require_figures_that_add_up(output)


def require_figures_that_add_up(output: str) -> None:
    counters, blocked = row(output, "Counters "), row(output, "Blocked ")
    assert counters[0] < counters[2], "the newcomer's is kept"
    assert 0 < counters[1] < counters[0]
    assert blocked[0] == blocked[2] > 1
    assert not blocked[1]
    usage, spent = row(output, "Usage of 'agents'"), row(output, "True spend in the ledger")
    agent = row(output, "  agent:research")
    between = amount(output, "between snapshot and wipe")
    not_added = amount(output, "counted after the wipe and not added")
    kept = amount(output, "after the wipe, in the counters")
    assert usage[0] == spent[0], "until the wipe the counters are exact"
    assert agent[0] >= 10 > agent[1] > 0
    assert agent[2] >= 10
    assert agent[2] < agent[0] + agent[1], "never a sum"
    assert between > 0
    assert not_added >= Decimal("0.5"), "the request that was allowed"
    assert kept >= 1, "the newcomer's"
    assert spent[2] - usage[2] == between + not_added
    assert spent[2] - spent[0] == not_added + kept
    words = " ".join(output.split())
    reported = re.findall(r"reports \$([0-9.]+) as restored, and \$([0-9.]+) as not added", words)
    # Without the ledger, the incident knows the same, to the last digit.
    assert [Decimal(each) for each in reported[0]] == [usage[2] - kept - not_added, not_added]


@pytest.mark.disaster
def test_missing_counters_are_reported(place: Path, tmp_path: Path) -> None:
    with started(place, tmp_path / "output.txt") as demo:
        # The snapshots are stored, and the restore starts some seconds later.
        demo.wait_for_output("is in no snapshot.")
        with demo.database() as database:
            gone = database.execute(
                "delete from budget_recovery.budget_record"
                " where tenant = 'acme' and budget_id = 'agents'"
            )
            assert gone.rowcount == 2
        assert demo.wait() == 1, demo.text
    demo.require_no_leftovers()
    assert not [*place.iterdir()]
    output = demo.text
    assert "agent:research requests $0.50 more: ALLOWED\n    (" in output.partition(" 9  ")[2]
    assert "  no  18 blocks from before the wipe are back" in output
    assert "for 'agent:research', lifetime is not blocked" in " ".join(output.split())
    assert "  no  the request that was refused before the wipe is refused again" in output
    assert "Not everything in the snapshot came back. Total time: " in output
    assert "Error" not in output


@pytest.mark.disaster
def test_a_restore_that_gives_up_is_reported_with_its_reason(place: Path, tmp_path: Path) -> None:
    with started(place, tmp_path / "output.txt") as demo:
        demo.wait_for_output("is in no snapshot.")
        with demo.database() as database:
            database.execute("truncate budget_recovery.capture cascade")
        assert demo.wait() == 1, demo.text
    demo.require_no_leftovers()
    assert "The restore gave up. No snapshot of any tenant is stored" in demo.text
    assert "Not everything in the snapshot came back." in demo.text


@pytest.mark.disaster
def test_a_dead_server_ends_the_demo_and_is_reported(place: Path, tmp_path: Path) -> None:
    with started(place, tmp_path / "output.txt") as demo:
        demo.wait_for_output(" 3  Use up a budget")
        nats = demo.wait_for_child(b"nats-server")
        os.kill(nats, signal.SIGKILL)
        assert demo.wait() == 1
    demo.require_no_leftovers()
    assert not [*place.iterdir()]
    assert "Error: NATS ended by SIGKILL" in demo.text


@pytest.mark.parametrize(
    ("when", "number", "code"),
    [
        ("ok  PostgreSQL ", signal.SIGINT, 130),
        (" 1  Run traffic", signal.SIGTERM, 143),
        (" 8  Restore the counters", signal.SIGINT, 130),
    ],
)
def test_a_stopped_demo_leaves_nothing(
    place: Path, tmp_path: Path, when: str, number: signal.Signals, code: int
) -> None:
    with started(place, tmp_path / "output.txt") as demo:
        demo.wait_for_output(when)
        assert demo.stop(number) == code, demo.text
    demo.require_no_leftovers()
    assert not [*place.iterdir()]
    assert demo.text.endswith("\nStopping ...\nStopped; all data are removed.\n")
    assert "Traceback" not in demo.text


def test_a_demo_that_is_stopped_during_initdb_leaves_nothing(place: Path, tmp_path: Path) -> None:
    with started(place, tmp_path / "output.txt") as demo:
        demo.wait_for_child(b"initdb")
        assert demo.stop(signal.SIGINT) == 130, demo.text
    demo.require_no_leftovers()
    assert not [*place.iterdir()]
    assert "Traceback" not in demo.text


def test_a_stopped_demo_with_keep_keeps_its_data(place: Path, tmp_path: Path) -> None:
    with started(place, tmp_path / "output.txt", "--keep") as demo:
        demo.wait_for_output(" 1  Run traffic")
        assert demo.stop(signal.SIGINT) == 130
    demo.require_no_leftovers()
    (directory,) = place.iterdir()
    assert demo.text.endswith(f"\nData and logs are in {directory}\nStopped.\n")
    assert {"gateway.ledger", "gateway.log", "nats.log", "postgres.log"} <= {
        each.name for each in directory.iterdir()
    }
    assert not (directory / "postgres" / "postmaster.pid").exists()
    # The account of the database passes through the directory itself, and lists nothing in it.
    require_private(place, allowed={directory: 0o711} if os.geteuid() == 0 else {})


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as a normal user already")
def test_a_normal_user_can_run_it(place: Path, tmp_path: Path) -> None:
    if not Account.of(NOBODY).may_run(sys.executable, "-c", "import budget_recovery_dagster"):
        pytest.skip("this checkout or its Python cannot be reached by a normal user")
    os.chown(place, NOBODY, NOBODY)
    with started(place, tmp_path / "output.txt", user=NOBODY) as demo:
        assert demo.wait() == 0, demo.text
    demo.require_no_leftovers()
    assert not [*place.iterdir()]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root drops to another account")
def test_root_is_refused_a_directory_that_the_database_cannot_reach(
    place: Path, tmp_path: Path
) -> None:
    place.chmod(0o700)
    with started(place, tmp_path / "output.txt") as demo:
        assert demo.wait() == 2
    assert "which cannot reach" in demo.text
    assert "Try: set TMPDIR" in demo.text
    assert not [*place.iterdir()]
