"""Looking at all that this project depends on, and saying of each failure what to do.

Nothing is changed by it. No check keeps another from being made, unless that one needs what the
first has not found: then it is not looked at, and says why.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime

from budget_recovery_dagster.domain.clock_findings import (
    CLOCKS,
    HOST_CLOCK,
    STORE_CLOCK,
    judge_host_clock,
    judge_store_clock,
)
from budget_recovery_dagster.domain.findings import (
    Examination,
    Finding,
    State,
    Topic,
    not_looked_at,
    ok,
)
from budget_recovery_dagster.errors import SettingsError
from budget_recovery_dagster.examination_ports import (
    DatabaseExamination,
    Installation,
    OpenDatabaseExamination,
    OpenStoreExamination,
    StoreExamination,
)
from budget_recovery_dagster.services.doctor_database import DATABASE_CHECKS, look_at_database
from budget_recovery_dagster.services.doctor_store import (
    STORE_CHECKS,
    StoreLook,
    look_at_store,
)
from budget_recovery_dagster.services.looking import failed, look

_HERE = Topic.INSTALLATION


@dataclass(frozen=True, slots=True)
class DoctorService:
    """Examines this installation, the database and the store.

    ``wrong_settings`` are those that cannot be used; ``bucket`` is None where its setting is one of
    them. ``now`` tells the time of this host.
    """

    installation: Installation
    open_database: OpenDatabaseExamination
    open_store: OpenStoreExamination
    wrong_settings: tuple[SettingsError, ...]
    bucket: str | None
    now: Callable[[], datetime]

    def examine(self) -> Examination:
        """Look at everything; whatever goes wrong on the way is a finding."""
        at = self.now()
        findings = [*self._settings(), *self._installation()]
        with ExitStack() as exits:
            database, found = self._open_database(exits)
            findings += found
            store, found = self._open_store(exits)
            findings += found
            findings += self._clocks(database, store)
        return Examination(at, tuple(findings))

    def _settings(self) -> list[Finding]:
        if not self.wrong_settings:
            return [ok(_HERE, "settings", "all are valid")]
        return [failed(_HERE, "settings", error) for error in self.wrong_settings]

    def _installation(self) -> list[Finding]:
        look_here = self.installation
        return [
            look(_HERE, "python", look_here.python),
            look(_HERE, "packages", look_here.packages),
            look(_HERE, "tables", lambda: str(look_here.tables_place())),
            look(_HERE, "Dagster's storage", self._dagster_storage),
        ]

    def _dagster_storage(self) -> Finding:
        name = "Dagster's storage"
        storage = self.installation.dagster_storage()
        if storage is None:
            why = "It is that of the running `budget-recovery dev`, which sees to it."
            return not_looked_at(_HERE, [name], why)[0]
        if storage.problem:
            return Finding(_HERE, name, State.ADVICE, storage.problem, storage.to_do)
        return ok(_HERE, name, storage.said)

    def _open_database(self, exits: ExitStack) -> tuple[DatabaseExamination | None, list[Finding]]:
        name, *others = DATABASE_CHECKS
        try:
            database = exits.enter_context(self.open_database())
        except Exception as error:  # noqa: BLE001 - a finding, which stops no other check
            why = "There is no connection to the control-plane database."
            return None, [
                failed(Topic.DATABASE, name, error),
                *not_looked_at(Topic.DATABASE, others, why),
            ]
        return database, look_at_database(database, self.bucket)

    def _open_store(self, exits: ExitStack) -> tuple[StoreLook, list[Finding]]:
        try:
            store: StoreExamination = exits.enter_context(self.open_store())
        except Exception as error:  # noqa: BLE001 - a finding, which stops no other check
            why = "The settings of the connection to NATS are not usable."
            found = [
                finding
                for topic, names in STORE_CHECKS.items()
                for finding in not_looked_at(topic, names, why)
                if (topic, finding.name) != (Topic.SERVERS, "connection")
            ]
            return StoreLook(), [failed(Topic.SERVERS, "connection", error), *found]
        return look_at_store(store, self.bucket, self.now())

    def _clocks(self, database: DatabaseExamination | None, store: StoreLook) -> list[Finding]:
        topic = Topic.CLOCKS
        if database is None:
            return not_looked_at(
                topic, CLOCKS, "The clock that all are compared with is the database's."
            )
        known = database
        if store.ask is None:
            of_store = not_looked_at(topic, [STORE_CLOCK], "The store could not be asked.")[0]
        else:
            ask = store.ask
            of_store = look(
                topic,
                STORE_CLOCK,
                lambda: judge_store_clock(
                    known.now(), ask().told_at, known.now(), version=store.version
                ),
            )
        of_host = look(
            topic, HOST_CLOCK, lambda: judge_host_clock(self.now(), known.now(), self.now())
        )
        return [of_store, of_host]
