"""Names of files that are safe whatever a tenant is called.

A name may hold any character, be very long, be ``..``, or differ from another in case only. So a
directory is called by a readable part of the name and a digest of the whole of it; the name itself
is in the table.
"""

import hashlib
import re

from budget_recovery_dagster.domain.moments import Hour

_LONGEST_SLUG = 40
# 96 bits: nobody can find a second name to a tenant's directory.
_DIGEST_DIGITS = 24

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_DIRECTORY = re.compile(rf"[A-Za-z0-9_-]{{1,{_LONGEST_SLUG}}}-[0-9a-f]{{{_DIGEST_DIGITS}}}")
_TABLE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}Z\.parquet")
# Readers of a whole directory pass over what begins with a dot.
_UNFINISHED = re.compile(rf"\.{_TABLE.pattern}\.unfinished")


def directory_of(tenant: str) -> str:
    """Return the name of a tenant's directory, such as ``acme-7c6f…``: 65 characters at most."""
    # An underscore in front would hide it from readers of a whole directory.
    slug = _UNSAFE.sub("-", tenant)[:_LONGEST_SLUG].strip("-_") or "tenant"
    return f"{slug}-{hashlib.sha256(tenant.encode()).hexdigest()[:_DIGEST_DIGITS]}"


def table_of(hour: Hour) -> str:
    """Return the name of an hour's table: ``2026-11-29T14Z.parquet``."""
    return f"{hour.start:%Y-%m-%dT%HZ}.parquet"


def unfinished(table: str) -> str:
    """Return under which name a table is written until it is whole."""
    return f".{table}.unfinished"


def is_directory_name(name: str) -> bool:
    """Whether a tenant's directory may be called so."""
    return _DIRECTORY.fullmatch(name) is not None


def is_table_name(name: str) -> bool:
    """Whether an hour's table may be called so."""
    return _TABLE.fullmatch(name) is not None


def is_unfinished_name(name: str) -> bool:
    """Whether this is what a run has left that was killed while it wrote."""
    return _UNFINISHED.fullmatch(name) is not None
