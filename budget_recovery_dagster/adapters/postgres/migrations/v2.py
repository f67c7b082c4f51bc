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

# Version 1 recorded the longest expiry of a window's keys, and null if any key has none. So null is
# unknown there. A content has the expiries of its keys only if they differ, so that most hours cost
# no more than before. The hash is that of Python's hash_expiries.
EXPIRY = """
alter table budget_recovery.budget_record add column never_expires boolean;
comment on column budget_recovery.budget_record.expiry_seconds is
    'When the store drops every key of it: seconds after the window''s end or, for a lifetime, '
    'after its last write; null: see never_expires.';
comment on column budget_recovery.budget_record.never_expires is
    'Without expiry_seconds, whether none of its keys expires; false: they differ, see '
    'budget_content.expiries; null: unknown.';
alter table budget_recovery.budget_content
    add column expiries bigint[],
    add column expiry_hash bytea,
    add constraint content_expiries_are_whole check (
        num_nulls(expiries, expiry_hash) in (0, 2)
        and (
            expiries is null
            or coalesce(array_ndims(expiries), 1) = 1
            and cardinality(expiries) = cardinality(entities)
            and octet_length(expiry_hash) = 32
        )
    );
comment on column budget_recovery.budget_content.expiries is
    'When the store drops the keys, in the order of entities, if that differs between them: as '
    'budget_record.expiry_seconds; null inside: never.';
comment on column budget_recovery.budget_content.expiry_hash is
    'SHA-256 of the sorted entities with their expiries; see expiries_are_intact.';
create function budget_recovery.expiries_are_intact(
    expiry_hash bytea, entities text[], expiries bigint[]
) returns boolean
language sql immutable parallel safe cost 10000
return coalesce(
    num_nulls(expiry_hash, expiries) = 2
    or cardinality(entities) = cardinality(expiries)
    and coalesce(array_ndims(entities), 1) = 1
    and coalesce(array_ndims(expiries), 1) = 1
    and expiry_hash = (
        select sha256(convert_to(
            coalesce(
                string_agg(
                    octet_length(e.entity)::text || ':' || e.entity || '='
                        || coalesce(e.expiry::text, 'never') || ';',
                    '' order by e.entity collate "C"
                ),
                ''
            ),
            'UTF8'
        ))
        from unnest(entities, expiries) as e (entity, expiry)
    ),
    false
);
comment on function budget_recovery.expiries_are_intact is
    'Whether the expiries of a content match their hash. If they do not, they are unknown.';
"""

BLOCKS: tuple[str, ...] = (BOARD, EXPIRY)
"""In the order of their execution."""
