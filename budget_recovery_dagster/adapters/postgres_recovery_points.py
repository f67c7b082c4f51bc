"""Reading a tenant's recovery point from PostgreSQL."""

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

from budget_recovery_dagster.adapters.postgres_connection import Connection
from budget_recovery_dagster.adapters.postgres_contents import stream_contents
from budget_recovery_dagster.domain.counters import BudgetWindow
from budget_recovery_dagster.domain.recovery_point import Usages
from budget_recovery_dagster.domain.windows import Window

# For every budget and window that is current: the contents of its newest record that covers all
# earlier ones and of those after it; of all its records, if none covers. Of records with one
# content the newest stands for all: whatever resets there are, of no other is more eligible. Only
# narrow rows are looked at here; the wide contents follow by id, each once.
_POINT = """
with newest_covering as (
    select budget_id, window_token, max(captured_at) filter (where covers_earlier) as since
    from budget_recovery.budget_record
    where tenant = %(tenant)s
      and (window_start is null or window_start <= %(now)s)
      and (window_end is null or window_end > %(now)s)
    group by budget_id, window_token
)
select r.budget_id, r.window_token, r.content_id, max(r.captured_at)
from newest_covering n
join budget_recovery.budget_record r
  on r.tenant = %(tenant)s
 and r.budget_id = n.budget_id
 and r.window_token = n.window_token
 and r.captured_at >= coalesce(n.since, '-infinity')
group by r.budget_id, r.window_token, r.content_id
"""


class Holder(NamedTuple):
    """A window that has records with some content, and when the newest of them was captured."""

    of: BudgetWindow
    captured_at: datetime


def stream_point(
    connection: Connection, tenant: str, now: datetime
) -> Iterator[tuple[int, list[Holder], Usages]]:
    """Give the contents that a tenant's recovery point is made of, and of which windows each is.

    They are whole: what resets make ineligible is among them, and so is the newest record of each
    current window. Until the last one has come, the connection is of no other use.
    """
    holders: defaultdict[int, list[Holder]] = defaultdict(list)
    scope = {"tenant": tenant, "now": now}
    for budget, token, content_id, captured_at in connection.execute(_POINT, scope):
        of = BudgetWindow(budget, Window.parse(token))
        holders[content_id].append(Holder(of, captured_at))
    for content_id, usages in stream_contents(connection, sorted(holders)):
        yield content_id, holders[content_id], usages
