"""The migrations of the control-plane schema, run by ``schema.migrate``."""

VERSIONS = ("v4", "v3", "v2", "v1")
"""All versions, newest first; listed here so that opening a database needs no alembic."""
