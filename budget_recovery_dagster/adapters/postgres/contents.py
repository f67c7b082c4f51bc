"""The contents of records: how they are read, and verified here or on the server."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from decimal import Decimal
from itertools import chain
from typing import Any, LiteralString, NamedTuple

import psycopg

from budget_recovery_dagster.adapters.postgres.database import Connection
from budget_recovery_dagster.domain.counters import (
    NEVER_EXPIRES,
    NO_EXPIRY,
    Expiries,
    NoExpiry,
    Usages,
    hash_expiries,
    hash_usages,
)

# A content that is missing is damage like any other.
_CONTENTS = """
select wanted.content_id, c.content_hash, c.entities, c.usages, c.expiry_hash, c.expiries,
       c.never_expires
from unnest(%s::bigint[]) with ordinality as wanted (content_id, position)
left join budget_recovery.budget_content c using (content_id)
order by wanted.position
"""
# The server's time limit is per statement, and reading everything may well take longer.
_AT_ONCE = 500
_DAMAGED_OF = """
select content_id
from unnest(%(content_ids)s::bigint[]) as content_id
where not budget_recovery.is_stored_intact(content_id)
"""
# Few enough for a statement of a second or so, even if each content has ten thousand counters.
_VERIFIED_AT_ONCE = 200
_LIMIT_STATEMENT = "select set_config('statement_timeout', %s, true)"
PER_KEY = "per_key"
"""The ``expiry_kind`` of a record whose keys differ; otherwise it is that of all keys."""
_WITHOUT_SECONDS = frozenset(each.value for each in NoExpiry)
Contents = Mapping[str, Mapping[int, int]]
"""How many records have each content, by tenant and content id."""


def as_captured(
    content_hash: bytes | None, entities: list[Any] | None, usages: list[Any] | None
) -> Usages | None:
    """Return the usages of a stored content; None if it is damaged.

    The aggregate's empty name becomes None. ``content_is_intact`` is the same rule in SQL.
    """
    # The verified content may have any form: lists of another length, shape or type are damage,
    # too.
    if content_hash is None or entities is None or usages is None:
        return None
    if not all(isinstance(entity, str) for entity in entities):
        return None
    if not all(isinstance(usage, Decimal) and usage.is_finite() for usage in usages):
        return None
    content = {entity or None: usage for entity, usage in zip(entities, usages, strict=False)}
    is_whole = len(content) == len(entities) == len(usages)
    return content if is_whole and hash_usages(content) == content_hash else None


def _known_expiries(
    expiry_hash: bytes | None,
    entities: list[Any] | None,
    expiries: list[Any] | None,
    never: list[Any] | None,
) -> Expiries:
    """Return the expiries of a stored content that is intact; none if they are damaged.

    ``expiries_are_intact`` is the same rule in SQL.
    """
    if expiry_hash is None or entities is None or expiries is None or never is None:
        return {}
    if not all(expiry is None or isinstance(expiry, int) for expiry in expiries):
        return {}
    if not all(isinstance(each, bool) for each in never):
        return {}
    known: Expiries = {
        entity or None: NEVER_EXPIRES if is_never else NO_EXPIRY if expiry is None else expiry
        for entity, expiry, is_never in zip(entities, expiries, never, strict=False)
    }
    is_whole = len(known) == len(entities) == len(expiries) == len(never)
    return known if is_whole and hash_expiries(known) == expiry_hash else {}


class Content(NamedTuple):
    """A stored content; ``usages`` is None if it is damaged.

    ``stored`` are the columns about the expiries of its keys, if these differ from each other. They
    are verified when they are used, since most readers want only the usages.
    """

    content_id: int
    usages: Usages | None
    stored: tuple[bytes | None, list[Any] | None, list[Any] | None, list[Any] | None]

    def expiries_in(self, seconds: int | None, kind: str | None) -> Expiries:
        """Return what a record with these columns, and this content, knows."""
        if self.usages is None:
            return {}
        if seconds is not None:
            return dict.fromkeys(self.usages, seconds)
        if kind == PER_KEY:
            return _known_expiries(*self.stored)
        return dict.fromkeys(self.usages, NoExpiry(kind)) if kind in _WITHOUT_SECONDS else {}


def stream_contents(connection: Connection, content_ids: Sequence[int]) -> Generator[Content]:
    """Yield contents in the order of the ids; see ``stream_verified``."""
    for first in range(0, len(content_ids), _AT_ONCE):
        with connection.cursor() as cursor:
            wanted = list(content_ids[first : first + _AT_ONCE])
            for content_id, content_hash, entities, usages, *rest in cursor.stream(
                _CONTENTS, (wanted,)
            ):
                expiry_hash, *expiries = rest
                captured = as_captured(content_hash, entities, usages)
                yield Content(content_id, captured, (expiry_hash, entities, *expiries))


def stream_verified(
    connection: Connection, content_ids: Sequence[int]
) -> Generator[tuple[int, Usages | None]]:
    """Yield contents with their ids, in the order of the ids; None if one is damaged.

    They are read one by one, because all of them may not fit into memory. Nothing else can use the
    connection until the last one is read, or the generator is closed: not even to roll back.
    """
    with closing(stream_contents(connection, content_ids)) as contents:
        for content in contents:
            yield content.content_id, content.usages


class TimeUpError(Exception):
    """The verification has used up its time."""


class Verification:
    """Verifies contents on the server, in short statements and until a time limit."""

    def __init__(
        self, connection: Connection, within: timedelta | None, on_progress: Callable[[str], None]
    ) -> None:
        self._connection = connection
        self._on_progress = on_progress
        self._until = None if within is None else time.monotonic() + within.total_seconds()
        self._verified: set[int] = set()
        self.damaged: set[int] = set()

    def contents_of(self, query: LiteralString, scope: Mapping[str, Any]) -> Contents:
        """Return the contents of a query."""
        contents: defaultdict[str, dict[int, int]] = defaultdict(dict)
        for tenant, content_id, count in self._rows(query, scope):
            contents[tenant][content_id] = count
        return contents

    def verify(self, contents: Contents) -> None:
        """Verify contents that are not verified yet, tenant by tenant."""
        left = [
            content_id
            for content_id in dict.fromkeys(chain.from_iterable(contents.values()))
            if content_id not in self._verified
        ]
        for first in range(0, len(left), _VERIFIED_AT_ONCE):
            self._on_progress(f"{first} of {len(left)} stored contents are verified.")
            batch = left[first : first + _VERIFIED_AT_ONCE]
            self.damaged.update(*self._rows(_DAMAGED_OF, {"content_ids": batch}))
            self._verified.update(batch)

    def is_complete(self, content_ids: Collection[int]) -> bool:
        """Whether all these contents are verified."""
        return self._verified.issuperset(content_ids)

    def count_damaged(self, contents: Mapping[int, int]) -> int:
        """Count the records whose content is known to be damaged."""
        return sum(count for each, count in contents.items() if each in self.damaged)

    def _rows(self, query: LiteralString, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        if self._until is not None:
            left = math.ceil((self._until - time.monotonic()) * 1000)
            if left <= 0:
                raise TimeUpError
            self._connection.execute(_LIMIT_STATEMENT, (str(left),))
        try:
            return self._connection.execute(query, parameters).fetchall()
        except psycopg.errors.QueryCanceled as error:
            if self._until is None:
                raise
            raise TimeUpError from error
