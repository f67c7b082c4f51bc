"""SQL of version 2, which changes tables and views of version 1.

Names compare byte by byte (COLLATE "C"), as in ``v1_snapshots``.
"""

# Nothing is known of leaderboards in snapshots of version 1: null.
BOARD = """
alter table budget_recovery.budget_record add column has_board boolean;
comment on column budget_recovery.budget_record.has_board is
    'Whether the gateway kept a leaderboard of this window, so that a restore may create one; '
    'null: unknown.';
"""

BLOCKS: tuple[str, ...] = (BOARD,)
"""In the order of their execution."""
