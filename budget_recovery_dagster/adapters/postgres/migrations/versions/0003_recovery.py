"""The store's marker, checks of the store, incidents with their attempts, and audits of restores.

Names are compared byte by byte (COLLATE "C"), as in the first step.
"""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# A marker and an intended one are parts of the baseline: without one there is neither.
MARKER = """
alter table budget_recovery.store
    add column marker_nonce text collate "C",
    add column marker_revision numeric(20),
    add column marked_at timestamptz,
    add column intended_nonce text collate "C",
    add constraint store_marker_is_whole check (
        num_nulls(marker_nonce, marker_revision, marked_at) in (0, 3)
    ),
    add constraint store_marker_revision_is_uint64 check (
        marker_revision between 0 and 18446744073709551615
    ),
    add constraint store_marker_is_of_a_baseline check (
        baseline_version is not null or num_nonnulls(marker_nonce, intended_nonce) = 0
    ),
    add constraint store_nonces_are_not_empty check (marker_nonce <> '' and intended_nonce <> '');
comment on column budget_recovery.store.state is
    'HEALTHY, RECOVERING or FAILED; snapshots are stored only while HEALTHY. It is another than '
    'HEALTHY exactly while an incident is open: both move in one transaction, under this row''s '
    'lock.';
comment on column budget_recovery.store.marker_nonce is
    'What our last marker in the store says; it is known to stand there.';
comment on column budget_recovery.store.marker_revision is
    'The sequence that the store gave to our last marker.';
comment on column budget_recovery.store.marked_at is
    'About when our last marker was written; the store may drop it for its age.';
comment on column budget_recovery.store.intended_nonce is
    'What a marker says that may have been written since; noted before the writing.';
"""

# The id is random and never a number: the database may be restored from a backup, and ids given out
# before are remembered for ever in the keys of Dagster runs.
INCIDENT = """
create table budget_recovery.incident (
    incident_id text collate "C" primary key,
    opened_at timestamptz not null,
    target_created_at timestamptz,
    target_last_sequence numeric(20),
    target_version bigint,
    target_marker_nonce text collate "C",
    target_marker_revision numeric(20),
    target_marked_at timestamptz,
    target_intended_nonce text collate "C",
    newest_point_at timestamptz,
    last_good_at timestamptz,
    attempts integer not null,
    launches bigint not null,
    launches_before bigint not null,
    next_launch_at timestamptz,
    waiting_since timestamptz,
    waiting_reason text,
    waits bigint,
    failed_at timestamptz,
    failure text collate "C",
    failure_detail text,
    closed_at timestamptz,
    outcome text collate "C",
    outcome_detail text,
    restored_tenants bigint,
    restored_windows bigint,
    restored_counters bigint,
    restored_boards bigint,
    constraint incident_id_is_a_uuid check (
        incident_id ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
    ),
    constraint incident_target_is_whole check (
        num_nulls(target_created_at, target_last_sequence, target_version) in (0, 3)
    ),
    constraint incident_target_sequence_is_uint64 check (
        target_last_sequence between 0 and 18446744073709551615
    ),
    constraint incident_target_marker_is_whole check (
        num_nulls(target_marker_nonce, target_marker_revision, target_marked_at) in (0, 3)
    ),
    constraint incident_target_marker_revision_is_uint64 check (
        target_marker_revision between 0 and 18446744073709551615
    ),
    constraint incident_target_marker_is_of_a_target check (
        target_version is not null
        or num_nonnulls(target_marker_nonce, target_intended_nonce) = 0
    ),
    constraint incident_counts_are_in_order check (
        attempts >= 0 and launches_before between 0 and launches
    ),
    constraint incident_waiting_is_whole check (
        num_nulls(waiting_since, waiting_reason, waits) in (0, 3) and waits > 0
    ),
    constraint incident_failure_is_whole check (
        num_nulls(failed_at, failure, failure_detail) in (0, 3)
    ),
    constraint incident_failure_is_known check (
        failure in (
            'there are no snapshots to restore from', 'writing back did not succeed'
        )
    ),
    constraint incident_end_is_whole check (
        num_nulls(
            closed_at, outcome, outcome_detail,
            restored_tenants, restored_windows, restored_counters, restored_boards
        ) in (0, 7)
    ),
    constraint incident_outcome_is_known check (
        outcome in (
            'restored', 'restored in part', 'nothing lost', 'nothing current', 'accepted by hand'
        )
    ),
    constraint incident_restored_is_not_negative check (
        least(restored_tenants, restored_windows, restored_counters, restored_boards) >= 0
    )
);
-- At most one is open.
create unique index incident_open on budget_recovery.incident ((closed_at is null))
where closed_at is null;
create index incident_opened_at on budget_recovery.incident (opened_at);
comment on table budget_recovery.incident is
    'A loss of the store with all that happened until it was put right; kept for ever. At most '
    'one is open, exactly while the store is not HEALTHY.';
comment on column budget_recovery.incident.incident_id is
    'A random id, part of the keys of the runs that restore.';
comment on column budget_recovery.incident.opened_at is 'When the first loss was written here.';
comment on column budget_recovery.incident.target_created_at is
    'The store that the recovery stands on: when its stream was created; null: it is gone.';
comment on column budget_recovery.incident.target_last_sequence is
    'The store that the recovery stands on: the highest sequence that it had given out.';
comment on column budget_recovery.incident.target_version is
    'The store that the recovery stands on: the version that its description has.';
comment on column budget_recovery.incident.target_marker_nonce is
    'The store that the recovery stands on: what our marker in it says; null: there is none.';
comment on column budget_recovery.incident.target_marker_revision is
    'The store that the recovery stands on: the sequence that it gave to our marker.';
comment on column budget_recovery.incident.target_marked_at is
    'The store that the recovery stands on: about when our marker was written.';
comment on column budget_recovery.incident.target_intended_nonce is
    'The store that the recovery stands on: what a marker says that may have been written since.';
comment on column budget_recovery.incident.newest_point_at is
    'The newest snapshot of any tenant at the time of the loss; null: there was none.';
comment on column budget_recovery.incident.last_good_at is
    'When the store was last known to be whole; what was counted between newest_point_at and this '
    'is in no snapshot.';
comment on column budget_recovery.incident.attempts is
    'Attempts claimed for the newest loss; each further loss begins again.';
comment on column budget_recovery.incident.launches is 'Restores launched by a sensor, in all.';
comment on column budget_recovery.incident.launches_before is
    'Of these, those before the newest attempt or the newest loss: the backoff counts from there.';
comment on column budget_recovery.incident.next_launch_at is
    'The earliest time of the next launch; null: at once.';
comment on column budget_recovery.incident.waiting_since is
    'Since when restores wait for the store; null: none waits.';
comment on column budget_recovery.incident.waiting_reason is 'What the last one waits for.';
comment on column budget_recovery.incident.waits is 'How many have looked in vain since then.';
comment on column budget_recovery.incident.failed_at is
    'When it was given up; a person has to look.';
comment on column budget_recovery.incident.failure is 'Why it was given up.';
comment on column budget_recovery.incident.failure_detail is 'The same for people, in full.';
comment on column budget_recovery.incident.closed_at is 'When it ended; null: it is open.';
comment on column budget_recovery.incident.outcome is
    'How it ended: restored, nothing lost, or nothing current.';
comment on column budget_recovery.incident.outcome_detail is 'The same for people, in full.';
comment on column budget_recovery.incident.restored_tenants is
    'Of how many tenants something was raised.';
comment on column budget_recovery.incident.restored_windows is
    'Of how many budgets and windows something was raised.';
comment on column budget_recovery.incident.restored_counters is 'How many counters were raised.';
comment on column budget_recovery.incident.restored_boards is
    'How many leaderboards were written.';
"""

LOSS = """
create table budget_recovery.store_loss (
    incident_id text collate "C" not null references budget_recovery.incident,
    position integer not null,
    found_at timestamptz not null,
    found_by text not null,
    verdict text collate "C" not null,
    reason text not null,
    before_created_at timestamptz not null,
    before_last_sequence numeric(20) not null,
    after_created_at timestamptz,
    after_last_sequence numeric(20),
    primary key (incident_id, position),
    constraint loss_position_is_positive check (position > 0),
    constraint loss_verdict_is_known check (
        verdict in ('recreated', 'regressed', 'marker lost')
    ),
    constraint loss_after_is_whole check (
        num_nulls(after_created_at, after_last_sequence) in (0, 2)
    ),
    constraint loss_sequences_are_uint64 check (
        before_last_sequence between 0 and 18446744073709551615
        and after_last_sequence between 0 and 18446744073709551615
    )
);
comment on table budget_recovery.store_loss is
    'The losses of an incident: one that comes while it is open belongs to it.';
comment on column budget_recovery.store_loss.incident_id is 'The incident that it belongs to.';
comment on column budget_recovery.store_loss.position is 'From 1, in the order of their finding.';
comment on column budget_recovery.store_loss.found_at is 'When it was found.';
comment on column budget_recovery.store_loss.found_by is 'The tick or run that found it.';
comment on column budget_recovery.store_loss.verdict is 'recreated, regressed or marker lost.';
comment on column budget_recovery.store_loss.reason is 'What the verdict rests on, for people.';
comment on column budget_recovery.store_loss.before_created_at is
    'The store that was lost: when its stream was created.';
comment on column budget_recovery.store_loss.before_last_sequence is
    'The store that was lost: the highest sequence that it was known to have given out.';
comment on column budget_recovery.store_loss.after_created_at is
    'The store that was found instead: when its stream was created; null: there was none.';
comment on column budget_recovery.store_loss.after_last_sequence is
    'The store that was found instead: the highest sequence that it had given out.';
"""

CHECK = """
create table budget_recovery.store_check (
    check_id bigint generated always as identity primary key,
    checked_at timestamptz not null,
    checked_by text not null,
    verdict text collate "C" not null,
    reason text not null,
    store_created_at timestamptz,
    store_last_sequence numeric(20),
    incident_id text collate "C" references budget_recovery.incident,
    constraint check_verdict_is_known check (
        verdict in (
            'unknown', 'first seen', 'unchanged', 'advanced',
            'recreated', 'regressed', 'marker lost'
        )
    ),
    constraint check_identity_is_whole check (
        num_nulls(store_created_at, store_last_sequence) in (0, 2)
    ),
    constraint check_sequence_is_uint64 check (
        store_last_sequence between 0 and 18446744073709551615
    )
);
-- The newest, and those that are too old.
create index store_check_checked_at on budget_recovery.store_check (checked_at, check_id);
comment on table budget_recovery.store_check is
    'What was found in comparisons of the store with what was accepted: all checks of the sensor, '
    'the losses that captures and restores found, and the acceptance after each recovery. Of the '
    'last 30 days; the newest one that found the store whole is kept in any case.';
comment on column budget_recovery.store_check.check_id is 'In the order of their writing.';
comment on column budget_recovery.store_check.checked_at is 'When the store was looked at.';
comment on column budget_recovery.store_check.checked_by is 'The tick or run that looked.';
comment on column budget_recovery.store_check.verdict is
    'unknown, first seen, unchanged or advanced; or a loss: recreated, regressed, marker lost.';
comment on column budget_recovery.store_check.reason is 'What the verdict rests on, for people.';
comment on column budget_recovery.store_check.store_created_at is
    'The identity that was seen: when the stream was created; null: none was seen.';
comment on column budget_recovery.store_check.store_last_sequence is
    'The identity that was seen: the highest sequence that the stream had given out.';
comment on column budget_recovery.store_check.incident_id is
    'The incident that the check opened, or found open.';
"""

ATTEMPT = """
create table budget_recovery.restore_attempt (
    incident_id text collate "C" not null,
    loss integer not null,
    number integer not null,
    run_id text collate "C" not null,
    holder text not null,
    started_at timestamptz not null,
    ended_at timestamptz,
    outcome text,
    primary key (incident_id, loss, number),
    foreign key (incident_id, loss) references budget_recovery.store_loss,
    constraint attempt_number_is_positive check (number > 0),
    constraint attempt_end_is_whole check (num_nulls(ended_at, outcome) in (0, 2))
);
comment on table budget_recovery.restore_attempt is
    'Tries at restoring after a loss, written before their work begins.';
comment on column budget_recovery.restore_attempt.incident_id is 'The incident.';
comment on column budget_recovery.restore_attempt.loss is 'The position of the loss in it.';
comment on column budget_recovery.restore_attempt.number is 'From 1, for each loss.';
comment on column budget_recovery.restore_attempt.run_id is 'The Dagster run that tries.';
comment on column budget_recovery.restore_attempt.holder is
    'Who holds the lease under which it tries.';
comment on column budget_recovery.restore_attempt.started_at is 'When it was claimed.';
comment on column budget_recovery.restore_attempt.ended_at is
    'When it ended; null: it is under way, or it died.';
comment on column budget_recovery.restore_attempt.outcome is 'How it ended, for people.';
"""

# The sums are of any number of usages, each of up to 20 integer digits, so they are not bounded by
# what one usage may be; the bound refuses NaN and Infinity.
AUDIT = """
create table budget_recovery.restore_audit (
    audit_id bigint generated always as identity primary key,
    at timestamptz not null,
    run_id text collate "C" not null,
    who text not null,
    why text not null,
    incident_id text collate "C" references budget_recovery.incident,
    tenant text collate "C" not null,
    budget_id text collate "C" not null,
    window_token text collate "C" not null,
    point_at timestamptz not null,
    entries bigint not null,
    planned bigint not null,
    raised bigint not null,
    kept bigint not null,
    skipped bigint not null,
    usage_before numeric not null,
    usage_after numeric not null,
    notes jsonb not null,
    finished_at timestamptz,
    -- What was begun is found by it to be finished.
    constraint audit_entry_is_one unique (run_id, at, tenant, budget_id, window_token),
    constraint audit_names_are_not_empty check (tenant <> '' and budget_id <> ''),
    constraint audit_counts_are_not_negative check (
        least(entries, planned, raised, kept, skipped) >= 0
    ),
    constraint audit_usages_are_in_bounds check (
        usage_before >= 0 and usage_before < 1e38 and usage_after >= 0 and usage_after < 1e38
    ),
    constraint audit_notes_is_a_list check (jsonb_typeof(notes) = 'array')
);
create index restore_audit_incident on budget_recovery.restore_audit (incident_id);
create index restore_audit_tenant on budget_recovery.restore_audit (tenant, at);
comment on table budget_recovery.restore_audit is
    'What each restore did to each budget and window, written before its first write and again '
    'when it is done; kept for ever.';
comment on column budget_recovery.restore_audit.audit_id is
    'In the order of their first writing.';
comment on column budget_recovery.restore_audit.at is
    'When the restore of the tenant was told first: the same for all that it did to the tenant.';
comment on column budget_recovery.restore_audit.run_id is 'The Dagster run that restored.';
comment on column budget_recovery.restore_audit.who is
    'Who restored: "run … on host (pid …)", the process that held the lease.';
comment on column budget_recovery.restore_audit.why is 'The reason that was given.';
comment on column budget_recovery.restore_audit.incident_id is
    'The incident for which it was done; null: for none.';
comment on column budget_recovery.restore_audit.tenant is 'The tenant.';
comment on column budget_recovery.restore_audit.budget_id is 'The budget.';
comment on column budget_recovery.restore_audit.window_token is
    'The window, such as 2026-11-29, 2026-W48, 2026-11, 2026-Q4 or lifetime.';
comment on column budget_recovery.restore_audit.point_at is
    'The newest snapshot that it was restored from.';
comment on column budget_recovery.restore_audit.entries is 'Counters that the snapshots hold.';
comment on column budget_recovery.restore_audit.planned is
    'Counters that were to be raised, by the plan that was made before the first write.';
comment on column budget_recovery.restore_audit.raised is
    'Counters that were raised; 0 until the restore is finished.';
comment on column budget_recovery.restore_audit.kept is 'Counters that were as high already.';
comment on column budget_recovery.restore_audit.skipped is 'Counters that were left as they were.';
comment on column budget_recovery.restore_audit.usage_before is
    'The sum of the counters that were read before.';
comment on column budget_recovery.restore_audit.usage_after is
    'The sum of the counters that were read after; until the restore is finished, what it will be.';
comment on column budget_recovery.restore_audit.notes is 'What was left, and why: a list of texts.';
comment on column budget_recovery.restore_audit.finished_at is
    'When this was written of a restore that is done; null: it is under way, or it was cut off.';
"""


def upgrade() -> None:
    """Make the tables."""
    for block in (MARKER, INCIDENT, LOSS, CHECK, ATTEMPT, AUDIT):
        op.execute(block)


def downgrade() -> None:
    """Refuse, as the first step does.

    Raises:
        NotImplementedError: always; the way back is a backup of the database.
    """
    raise NotImplementedError("there is no way down; restore a backup of the database instead")
