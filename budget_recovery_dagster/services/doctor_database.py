"""Looking at the control-plane database."""

from budget_recovery_dagster.domain.admission import require_bucket
from budget_recovery_dagster.domain.findings import (
    Finding,
    State,
    Topic,
    not_looked_at,
    ok,
    wrong,
)
from budget_recovery_dagster.examination_ports import DatabaseExamination
from budget_recovery_dagster.services.looking import look

_TOPIC = Topic.DATABASE
_MOST_TABLES = 4

DATABASE_CHECKS = ("connection", "version", "writable", "schema", "rights", "bucket")
"""What is looked at, in order."""


def look_at_database(database: DatabaseExamination, bucket: str | None) -> list[Finding]:
    """Look at a database that one is connected to; ``bucket`` None: its setting is wrong."""
    server = database.server
    connection, version, writable, schema, rights, of_bucket = DATABASE_CHECKS
    findings = [
        ok(_TOPIC, connection, f"database {server.database} as {server.role}"),
        look(_TOPIC, version, lambda: _version(database)),
        look(_TOPIC, writable, lambda: _writable(database)),
        look(_TOPIC, schema, lambda: f"version {database.require_current()}, the newest"),
    ]
    if findings[-1].state is not State.OK:
        # Other tables need other rights.
        why = "The schema is not the one that this version works on."
        return [*findings, *not_looked_at(_TOPIC, (rights, of_bucket), why)]
    findings.append(look(_TOPIC, rights, lambda: _rights(database)))
    if bucket is None:
        why = "The setting of the bucket is wrong."
        return [*findings, *not_looked_at(_TOPIC, [of_bucket], why)]
    return [*findings, look(_TOPIC, of_bucket, lambda: _bucket(database, bucket))]


def _version(database: DatabaseExamination) -> str:
    database.require_usable()
    return f"PostgreSQL {database.server.version}"


def _writable(database: DatabaseExamination) -> str:
    database.require_primary()
    return "it is the primary"


def _rights(database: DatabaseExamination) -> Finding | str:
    missing = database.missing_rights()
    if not missing:
        return "the role may read and write all that it needs to"
    more = len(missing) - _MOST_TABLES
    named = "; ".join([*missing[:_MOST_TABLES], *([f"{more} more"] if more > 0 else [])])
    role = database.server.role
    return wrong(
        _TOPIC,
        "rights",
        f"The role {role} lacks {named}.",
        f"let the owner of the schema run the grants in docs/operations.md for {role}.",
    )


def _bucket(database: DatabaseExamination, bucket: str) -> str:
    claimed = database.bucket()
    if claimed is None:
        return "not known yet; the first check or snapshot notes it"
    require_bucket(claimed, bucket)
    return claimed
