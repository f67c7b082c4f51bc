"""Alembic runs this for every command: the migrations, in the caller's open transaction.

``schema.migrate`` passes its connection. Without one nothing runs: a database is changed only
under the project's lock, never by alembic's own command line.
"""

from alembic import context

from budget_recovery_dagster.adapters.postgres.database import SCHEMA

context.configure(
    connection=context.config.attributes["connection"],
    version_table_schema=SCHEMA,
)
with context.begin_transaction():
    context.run_migrations()
