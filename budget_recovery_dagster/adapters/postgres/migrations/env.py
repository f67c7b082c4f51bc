"""What alembic runs for every command: the steps, in the transaction that the caller has open.

``database.migrate`` hands its connection over. There is no way to run without one: a
database is always changed under the project's lock, never by a script on the side.
"""

from alembic import context

from budget_recovery_dagster.adapters.postgres.database import SCHEMA

context.configure(
    connection=context.config.attributes["connection"],
    version_table_schema=SCHEMA,
)
with context.begin_transaction():
    context.run_migrations()
