"""SQL of version 2, which changes tables and views of version 1.

Names compare byte by byte (COLLATE "C"), as in ``v1_snapshots``.
"""

# Never pruned: about one row an hour. An id is random, so that a database that was restored from a
# backup never gives an id a second time.
LANDMARK = """
create table budget_recovery.landmark (
    position bigint generated always as identity primary key,
    landmark_id text collate "C" not null unique default gen_random_uuid()::text,
    at timestamptz not null,
    kind text collate "C" not null,
    about text collate "C",
    deployment_id text collate "C" not null,
    marker_number bigint not null,
    store_created_at timestamptz,
    constraint landmark_kind_is_known check (
        kind in (
            'capture', 'reset', 'incident_opened', 'incident_closed', 'acceptance',
            'renewals_lost'
        )
    ),
    constraint landmark_number_is_not_negative check (marker_number >= 0)
);
-- A run of captures has one landmark.
create unique index landmark_of_capture on budget_recovery.landmark (about)
where kind = 'capture';
comment on table budget_recovery.landmark is
    'Events that an older copy of this database lacks. Our marker in the store names the newest '
    'one, so the store shows whether the database went back. Never pruned.';
comment on column budget_recovery.landmark.position is 'Ascending in the order of recording.';
comment on column budget_recovery.landmark.landmark_id is 'A random id, which a marker names.';
comment on column budget_recovery.landmark.at is 'When the event was recorded.';
comment on column budget_recovery.landmark.kind is
    'capture (a run), reset, incident_opened, incident_closed, acceptance (of a store), or '
    'renewals_lost: the database had lost renewals of the marker and nothing else.';
comment on column budget_recovery.landmark.about is
    'The run of a capture or the id of an incident; null: nothing further.';
comment on column budget_recovery.landmark.deployment_id is
    'The installation, in case the row of the store is lost.';
comment on column budget_recovery.landmark.marker_number is
    'The highest number of a marker at that time, in case the row of the store is lost.';
comment on column budget_recovery.landmark.store_created_at is
    'When the accepted store was created; null: the event says nothing about it.';
"""

# Markers of version 1 have no number; 0 stands for that. The age limit at their writing is unknown:
# null, as for a marker that never expires, so at worst a restore finds that nothing was lost.
IDENTITY = """
alter table budget_recovery.store
    add column given_number bigint not null default 0,
    add column given_nonce text collate "C",
    add column marker_number bigint not null default 0,
    add column marker_keeps_for interval,
    add column intended_number bigint not null default 0,
    add column intended_landmark text collate "C",
    add column seen_at timestamptz,
    add column other_markers text[] collate "C",
    add constraint store_numbers_are_in_order check (
        0 <= marker_number and marker_number <= given_number
        and 0 <= intended_number and intended_number <= given_number
    );
comment on column budget_recovery.store.given_number is
    'The highest number that was given to a marker; 0: none.';
comment on column budget_recovery.store.given_nonce is 'The nonce of the marker with that number.';
comment on column budget_recovery.store.marker_number is
    'The number of our last marker in the store; 0: it has none.';
comment on column budget_recovery.store.marker_keeps_for is
    'The age at which the store drops our last marker, as of its writing; null: never.';
comment on column budget_recovery.store.intended_number is 'The number of the intended marker.';
comment on column budget_recovery.store.intended_landmark is
    'The landmark that the intended marker names; null: none.';
comment on column budget_recovery.store.seen_at is
    'The time of the last good observation by the clock of the stream''s leader.';
comment on column budget_recovery.store.other_markers is
    'Other installations with a marker in the store at that time; null: unknown.';

alter table budget_recovery.incident
    add column target_marker_number bigint not null default 0,
    add column target_marker_keeps_for interval,
    add column target_intended_number bigint not null default 0,
    add column target_intended_landmark text collate "C",
    add column target_seen_at timestamptz,
    add column target_other_markers text[] collate "C",
    drop constraint incident_outcome_is_known,
    add constraint incident_outcome_is_known check (
        outcome in (
            'restored', 'restored_in_part', 'nothing_lost', 'nothing_current', 'returned',
            'restored_manually', 'accepted'
        )
    );
comment on column budget_recovery.incident.target_marker_number is
    'The restore target: the number of our marker in it.';
comment on column budget_recovery.incident.target_marker_keeps_for is
    'The restore target: the age at which it drops our marker; null: never.';
comment on column budget_recovery.incident.target_intended_number is
    'The restore target: the number of the intended marker.';
comment on column budget_recovery.incident.target_intended_landmark is
    'The restore target: the landmark that the intended marker names.';
comment on column budget_recovery.incident.target_seen_at is
    'The restore target: when it was observed, by the clock of its leader.';
comment on column budget_recovery.incident.target_other_markers is
    'The restore target: other installations with a marker in it; null: unknown.';
comment on column budget_recovery.incident.outcome is
    'How it ended: restored, restored_in_part, nothing_lost, nothing_current, returned, '
    'restored_manually or accepted.';
"""

VERDICT = """
alter table budget_recovery.store_loss
    add column evidence text collate "C",
    drop constraint loss_verdict_is_known;
update budget_recovery.store_loss
set evidence = case verdict
        when 'recreated' then case when after_created_at is null then 'gone' else 'recreated' end
        when 'regressed' then 'sequence_back'
        else 'marker_gone'
    end,
    verdict = 'lost';
alter table budget_recovery.store_loss
    add constraint loss_verdict_is_known check (
        verdict in ('lost', 'database_behind', 'other_store')
    );
comment on column budget_recovery.store_loss.verdict is 'lost, database_behind or other_store.';
comment on column budget_recovery.store_loss.evidence is
    'What the verdict rests on: gone, recreated, sequence_back, older_copy, marker_gone, '
    'landmark_missing, number_ahead, former_store, foreign_marker or predates; null: observations '
    'of the store did not agree.';

alter table budget_recovery.store_check
    add column evidence text collate "C",
    drop constraint check_verdict_is_known;
update budget_recovery.store_check
set evidence = case verdict
        when 'recreated' then case when store_created_at is null then 'gone' else 'recreated' end
        when 'regressed' then 'sequence_back'
        when 'marker_lost' then 'marker_gone'
    end,
    verdict = case
        when verdict in ('unchanged', 'advanced') then 'same'
        when verdict in ('recreated', 'regressed', 'marker_lost') then 'lost'
        else verdict
    end;
alter table budget_recovery.store_check
    add constraint check_verdict_is_known check (
        verdict in ('unknown', 'first_seen', 'same', 'lost', 'database_behind', 'other_store')
    );
comment on column budget_recovery.store_check.verdict is
    'unknown, first_seen or same; or an alarm: lost, database_behind, other_store.';
comment on column budget_recovery.store_check.evidence is
    'What an alarm rests on, as in store_loss; or what is reported of the accepted store: '
    'marker_removed.';
"""

# What version 1 knows of earlier stores and events. The order of the runs is that of their times.
FORMER = """
insert into budget_recovery.landmark (
    at, kind, about, deployment_id, marker_number, store_created_at
)
select min(c.captured_at), 'capture', c.run_id, s.deployment_id, 0, min(c.store_created_at)
from budget_recovery.capture c, budget_recovery.store s
group by c.run_id, s.deployment_id
order by min(c.captured_at);
insert into budget_recovery.landmark (at, kind, deployment_id, marker_number, store_created_at)
select clock_timestamp(), 'acceptance', deployment_id, 0, baseline_created_at
from budget_recovery.store
where baseline_created_at is not null;
"""

BLOCKS: tuple[str, ...] = (LANDMARK, IDENTITY, VERDICT, FORMER)
"""In the order of their execution."""
