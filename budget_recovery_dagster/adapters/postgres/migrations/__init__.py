"""The migrations of the control-plane schema, run by ``database.migrate``."""

VERSIONS = ("0006", "0005", "0004", "0003", "0002", "0001")
"""All versions, newest first; listed here so that opening a database needs no alembic."""
