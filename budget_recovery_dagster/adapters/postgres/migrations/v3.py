"""SQL of version 3, which changes tables and views of version 2.

Names compare byte by byte (COLLATE "C"), as in ``v1_snapshots``.
"""

ATTEMPTS = """
alter table budget_recovery.incident
    add column next_attempt_at timestamptz,
    add column failure_code text collate "C";
comment on column budget_recovery.incident.next_attempt_at is
    'The earliest time of the next attempt; null: now.';
comment on column budget_recovery.incident.failure_code is
    'The code of the error that ended the last attempt before the failure; null: unknown.';
"""

BLOCKS: tuple[str, ...] = (ATTEMPTS,)
"""In the order of their execution."""
