"""The environment of a scene: store, database, commands, jobs, sensors, and its documents."""

import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg
import pyarrow.parquet as pq
from psycopg import sql

from tests.scenes.dagster_records import run_record, tick_record
from tests.scenes.gateway import Gateway
from tests.scenes.placeholders import Known, Rows, ids_in, normalized, replaced
from tests.scenes.servers import Servers

BUCKET = "budget-usage"
PROGRAM = Path(sysconfig.get_path("scripts"), "budget-recovery")
_PREFIX = "BUDGET_RECOVERY_"
_COMMAND_SECONDS = 180
# On a busy machine; most scenes take a minute or two.
_LONGEST_SCENE = timedelta(minutes=10)
_PROJECT = Path(__file__).parents[2]


@dataclass
class Stage:
    """The servers of one scene, and its documents so far."""

    gateway: Gateway
    database_url: str
    home: Path
    environment: dict[str, str]
    instance: dg.DagsterInstance
    began: datetime
    documents: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    snapshots: list[datetime] = field(default_factory=list)
    _runs: list[str] = field(default_factory=list)
    _cursors: dict[str, str | None] = field(default_factory=dict)
    _requests: list[dg.RunRequest] = field(default_factory=list)

    @property
    def definitions(self) -> dg.Definitions:
        """Load the project's definitions with the settings of this scene's environment."""
        from budget_recovery_dagster.definitions import defs  # noqa: PLC0415 - reads settings

        return defs

    def record(self, name: str, content: Any) -> None:
        """Add a document; volatile values are replaced."""
        assert name not in self.documents, name
        self.documents[name] = content

    def record_fixed(self, name: str, content: Any) -> None:
        """Add a document; only directories and dates are replaced."""
        assert name not in self.fixed, name
        self.fixed[name] = content

    def command(self, *arguments: str, **changed: str | None) -> dict[str, Any]:
        """Run a command; ``changed`` are settings that differ, None for unset ones."""
        environment = dict(self.environment)
        for name, value in changed.items():
            environment.pop(_PREFIX + name, None)
            if value is not None:
                environment[_PREFIX + name] = value
        ended = subprocess.run(
            [str(PROGRAM), *arguments],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=self.home,
            env=environment,
            timeout=_COMMAND_SECONDS,
        )
        output: Any = ended.stdout.splitlines()
        if "--json" in arguments and ended.stdout:
            output = json.loads(ended.stdout, parse_float=str)
        return {
            "arguments": list(arguments),
            "exit_code": ended.returncode,
            "output": output,
            "errors": ended.stderr.splitlines(),
        }

    def run(self, name: str, *arguments: str, **changed: str | None) -> None:
        """Record a command."""
        self.record(name, self.command(*arguments, **changed))

    def run_both(self, name: str, *arguments: str, **changed: str | None) -> None:
        """Record a read-only command twice: its page and its JSON."""
        with ThreadPoolExecutor(2) as pool:
            text = pool.submit(self.command, *arguments, **changed)
            as_json = pool.submit(self.command, *arguments, "--json", **changed)
        self.record(f"{name}, text", text.result())
        self.record(f"{name}, json", as_json.result())

    def job(
        self,
        name: str,
        job: str,
        config: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> dg.ExecuteInProcessResult:
        """Run a job in this process and record its run."""
        definition = self.definitions.resolve_job_def(job)
        run_config = {}
        if config is not None:
            (op,) = definition.nodes
            run_config = {"ops": {op.name: {"config": dict(config)}}}
        result = definition.execute_in_process(
            run_config=run_config,
            instance=self.instance,
            tags=dict(tags or {}),
            partition_key=self.hour if definition.partitions_def is not None else None,
            raise_on_error=False,
        )
        self._runs.append(result.run_id)
        self.record(name, run_record(self.instance, result))
        return result

    def capture(self, name: str) -> None:
        """Take the snapshot of this hour in its own second.

        Afterwards its age has two digits: the width of ages decides where lines break.
        """
        time.sleep(1.1)
        self.job(name, "hourly_snapshot_job")
        time.sleep(10)
        with self.database() as connection:
            rows = connection.execute(
                "select distinct captured_at from budget_recovery.capture order by captured_at"
            ).fetchall()
        self.snapshots = [row[0] for row in rows]

    def tick(self, name: str, sensor: str) -> None:
        """Evaluate a sensor once and record its result; requested runs are not started."""
        found = self.definitions.resolve_sensor_def(sensor)
        context = dg.build_sensor_context(
            instance=self.instance,
            cursor=self._cursors.get(sensor),
            repository_def=self.definitions.get_repository_def(),
            sensor_name=sensor,
            resources=self.definitions.resources,
        )
        record, returned = tick_record(lambda: found.evaluate_tick(context))
        if returned is not None:
            self._cursors[sensor] = returned.cursor
            self._requests += returned.run_requests or []
        self.record(name, record)

    def check(self, name: str) -> None:
        """Evaluate the loss sensor once."""
        self.tick(name, "store_loss_sensor")

    def schedule_tick(self, name: str, schedule: str) -> None:
        """Evaluate a schedule at the start of this hour."""
        found = self.definitions.resolve_schedule_def(schedule)
        context = dg.build_schedule_context(
            instance=self.instance,
            scheduled_execution_time=self.began.replace(minute=0, second=0, microsecond=0),
            repository_def=self.definitions.get_repository_def(),
            resources=self.definitions.resources,
        )
        record, _ = tick_record(lambda: found.evaluate_tick(context))
        self.record(name, record)

    def restore(self, name: str) -> dg.ExecuteInProcessResult:
        """Run the restore that a sensor requested last."""
        return self.job(name, "restore_job", tags=self._requests.pop().tags)

    def tables(self, name: str) -> None:
        """Record every table and view of the control plane's schema."""
        content: dict[str, Any] = {}
        with self.database() as connection:
            connection.execute("set timezone to 'UTC'")
            named = connection.execute(
                "select table_name from information_schema.tables"
                " where table_schema = 'budget_recovery' order by table_name"
            ).fetchall()
            for (table,) in named:
                query = sql.SQL("select to_jsonb(t)::text from budget_recovery.{} t")
                rows = connection.execute(query.format(sql.Identifier(table))).fetchall()
                content[table] = Rows(json.loads(row, parse_float=str) for (row,) in rows)
        self.record(name, content)

    def store(self, name: str) -> None:
        """Record everything in the bucket."""
        self.record(name, self.gateway.contents())

    def files(self, name: str) -> None:
        """Record the tables of the tenants."""
        place = Path(self.environment[_PREFIX + "TABLES_DIR"])
        content = {}
        for path in sorted(place.rglob("*.parquet")):
            table = pq.read_table(path)
            content[str(path.relative_to(place))] = {
                "schema": [f"{each.name}: {each.type}" for each in table.schema],
                "rows": [
                    {column: _exact(value) for column, value in row.items()}
                    for row in table.to_pylist()
                ],
            }
        self.record(name, content)

    @property
    def hour(self) -> str:
        """Return the partition of this hour."""
        return f"{self.began:%Y-%m-%d-%H}:00"

    @property
    def day(self) -> str:
        return f"{self.began:%Y-%m-%d}"

    @property
    def week(self) -> str:
        return f"{self.began:%G-W%V}"

    @property
    def month(self) -> str:
        return f"{self.began:%Y-%m}"

    @property
    def quarter(self) -> str:
        return f"{self.began:%Y}-Q{(self.began.month + 2) // 3}"

    def snapshot(self, number: int) -> str:
        """Return the timestamp of a snapshot, numbered from 1, as the commands accept it."""
        return self.snapshots[number - 1].astimezone(UTC).isoformat().replace("+00:00", "Z")

    def database(self) -> psycopg.Connection:
        return psycopg.connect(self.database_url, autocommit=True)

    def normalized(self) -> dict[str, Any]:
        """Return all documents with volatile values replaced."""
        ids = frozenset(each for content in self.documents.values() for each in ids_in(content))
        known = Known(self._texts() | self._windows(), tuple(self.snapshots), ids)
        documents = {name: normalized(each, known) for name, each in self.documents.items()}
        return documents | {
            name: replaced(each, self._texts()) for name, each in self.fixed.items()
        }

    def _texts(self) -> dict[str, str]:
        server = self.database_url.rpartition("/")[0]
        runs = {run: f"<run {number}>" for number, run in enumerate(self._runs, start=1)}
        return (
            runs
            | {run[:8]: name.replace(">", " in short>") for run, name in runs.items()}
            | {
                str(self.home): "<home>",
                str(_PROJECT): "<project>",
                sys.prefix: "<environment>",
                self.gateway.url: "<nats>",
                self.gateway.url.removeprefix("nats://"): "<nats host>",
                server: "<postgres>",
                server.partition("@")[2]: "<postgres host>",
                socket.gethostname(): "<host>",
            }
        )

    def _windows(self) -> dict[str, str]:
        return {
            self.day: "<day>",
            self.week: "<week>",
            self.month: "<month>",
            self.quarter: "<quarter>",
        }


@contextmanager
def stage(
    servers: Servers, name: str, longest: timedelta = _LONGEST_SCENE, /, **settings: str
) -> Iterator[Stage]:
    """Set up a scene in this process, which must not have run another scene.

    If less than ``longest`` remains of the hour, the scene starts in the next one.

    The settings are set first, because definitions may read them when imported.
    """
    began = _hour_with_time_left(longest)
    with tempfile.TemporaryDirectory(prefix="budget-recovery-scene-") as made:
        home = Path(made)
        gateway = Gateway(servers.nats_url, BUCKET)
        gateway.recreate()
        database_url = servers.fresh_database(f"scene_{name}")
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": made,
            "LANG": "C.UTF-8",
            "LOGNAME": "operator",
            "COLUMNS": "80",
            "PYTHONHASHSEED": "0",
            "DAGSTER_HOME": made,
            f"{_PREFIX}NATS_URL": servers.nats_url,
            f"{_PREFIX}POSTGRES_URL": database_url,
            f"{_PREFIX}TABLES_DIR": str(home / "tables"),
            f"{_PREFIX}DATA_DIR": str(home / "data"),
            f"{_PREFIX}CONVERGENCE_TIMEOUT_SECONDS": "3",
        }
        environment |= {_PREFIX + each: value for each, value in settings.items()}
        os.environ.clear()
        os.environ.update(environment)
        with dg.DagsterInstance.local_temp(made) as instance:
            yield Stage(gateway, database_url, home, environment, instance, began)


def _hour_with_time_left(longest: timedelta) -> datetime:
    """Return the present time; wait for the next hour first if the scene might outlast this one."""
    now = datetime.now(UTC)
    end = now.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    if end - now < longest:
        time.sleep((end - now).total_seconds() + 1)
    return datetime.now(UTC)


def _exact(value: Any) -> Any:
    return value if value is None or isinstance(value, datetime | int) else str(value)
