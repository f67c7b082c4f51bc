"""The accepted identity of the store in PostgreSQL."""

from budget_recovery_dagster.adapters.postgres_database import Database
from budget_recovery_dagster.adapters.postgres_registry import lock_store, move_baseline
from budget_recovery_dagster.domain import baseline_moves
from budget_recovery_dagster.domain.identity import Baseline
from budget_recovery_dagster.domain.standing import Standing


class PostgresBaselines:
    """The baseline in the row about the store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def intend_marker(self, nonce: str, *, judged: Baseline) -> Baseline:
        """Note that a marker with this nonce may be written from now on; a new version.

        Raises:
            BaselineMovedError: the baseline is not the ``judged`` one any more.
            CapturesPausedError: the store is not HEALTHY.
        """
        with self._database.writing() as connection:
            store = lock_store(connection)
            standing = Standing(store.state, store.baseline)
            intended = baseline_moves.intend_marker(standing, nonce, judged=judged)
            move_baseline(connection, intended)
            return intended

    def accept(self, baseline: Baseline, *, judged: Baseline | None) -> Baseline:
        """Replace the baseline; its version is one above that of the judged one.

        Raises:
            BaselineMovedError, CapturesPausedError: as ``intend_marker``.
        """
        with self._database.writing() as connection:
            store = lock_store(connection)
            standing = Standing(store.state, store.baseline)
            accepted = baseline_moves.accept(standing, baseline, judged=judged)
            move_baseline(connection, accepted)
            return accepted
