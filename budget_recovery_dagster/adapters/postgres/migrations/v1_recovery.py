"""SQL of version 1: incidents, checks of the store, restore attempts, audits and previews.

Names compare byte by byte (COLLATE "C"), as in ``v1_snapshots``.
"""

# The id is random, never a number: the database may be restored from a backup, and Dagster keeps
# run keys with earlier ids for ever. The time of the last release shows that a run which a person
# terminated before it needs no further action.
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
    held_at timestamptz,
    held_by text,
    held_reason text,
    released_at timestamptz,
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
    constraint incident_hold_is_whole check (
        num_nulls(held_at, held_by, held_reason) in (0, 3)
    ),
    constraint incident_failure_is_whole check (
        num_nulls(failed_at, failure, failure_detail) in (0, 3)
    ),
    constraint incident_failure_is_known check (
        failure in ('no_snapshots', 'not_written')
    ),
    constraint incident_end_is_whole check (
        num_nulls(
            closed_at, outcome, outcome_detail,
            restored_tenants, restored_windows, restored_counters, restored_boards
        ) in (0, 7)
    ),
    constraint incident_outcome_is_known check (
        outcome in (
            'restored', 'restored_in_part', 'nothing_lost', 'nothing_current',
            'restored_manually', 'accepted'
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
    'A loss of the store and what happened until its end; kept for ever. At most one is open, '
    'exactly while the store is not healthy.';
comment on column budget_recovery.incident.incident_id is
    'A random id, part of the run keys of its restores.';
comment on column budget_recovery.incident.opened_at is 'When its first loss was recorded.';
comment on column budget_recovery.incident.target_created_at is
    'The restore target: when its stream was created; null: there is no store.';
comment on column budget_recovery.incident.target_last_sequence is
    'The restore target: the highest sequence of its stream.';
comment on column budget_recovery.incident.target_version is
    'The restore target: the version of its description.';
comment on column budget_recovery.incident.target_marker_nonce is
    'The restore target: the nonce of our marker in it; null: there is none.';
comment on column budget_recovery.incident.target_marker_revision is
    'The restore target: the sequence of our marker.';
comment on column budget_recovery.incident.target_marked_at is
    'The restore target: about when our marker was written.';
comment on column budget_recovery.incident.target_intended_nonce is
    'The restore target: the nonce of a marker that may have been written since.';
comment on column budget_recovery.incident.newest_point_at is
    'The newest snapshot of any tenant at the time of the loss that has an intact record or never '
    'had a record; null: there was none.';
comment on column budget_recovery.incident.last_good_at is
    'When the store was last known to be intact; usage counted between newest_point_at and this '
    'time is in no intact record.';
comment on column budget_recovery.incident.attempts is
    'Attempts for the newest loss; each further loss, and each release, starts at 0 again.';
comment on column budget_recovery.incident.launches is 'All restores that a sensor launched.';
comment on column budget_recovery.incident.launches_before is
    'Launches before the newest attempt, loss or release; the backoff counts the later ones.';
comment on column budget_recovery.incident.next_launch_at is
    'The earliest time of the next launch; null: now.';
comment on column budget_recovery.incident.waiting_since is
    'Since when restores wait for the store; null: no restore waits.';
comment on column budget_recovery.incident.waiting_reason is 'Why the last one waits.';
comment on column budget_recovery.incident.waits is
    'Restores that found the store not ready since then.';
comment on column budget_recovery.incident.held_at is
    'Since when its restore is on hold; null: it is not.';
comment on column budget_recovery.incident.held_by is 'Who holds it.';
comment on column budget_recovery.incident.held_reason is 'The reason of the hold, for people.';
comment on column budget_recovery.incident.released_at is
    'When a hold last ended; null: never.';
comment on column budget_recovery.incident.failed_at is
    'When the restore failed for good, so that a person must act; null: it did not.';
comment on column budget_recovery.incident.failure is
    'Why it failed: no_snapshots or not_written.';
comment on column budget_recovery.incident.failure_detail is 'The same in full, for people.';
comment on column budget_recovery.incident.closed_at is 'When it ended; null: it is open.';
comment on column budget_recovery.incident.outcome is
    'How it ended: restored, restored_in_part, nothing_lost, nothing_current, restored_manually or '
    'accepted.';
comment on column budget_recovery.incident.outcome_detail is 'The same in full, for people.';
comment on column budget_recovery.incident.restored_tenants is
    'Tenants with a raised counter.';
comment on column budget_recovery.incident.restored_windows is
    'Budgets and windows with a raised counter.';
comment on column budget_recovery.incident.restored_counters is 'Raised counters.';
comment on column budget_recovery.incident.restored_boards is
    'Written leaderboards.';
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
        verdict in ('recreated', 'regressed', 'marker_lost')
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
    'The losses of an incident: the first one, and those found while it was open.';
comment on column budget_recovery.store_loss.incident_id is 'The incident that it belongs to.';
comment on column budget_recovery.store_loss.position is 'From 1, in the order of detection.';
comment on column budget_recovery.store_loss.found_at is 'When it was found.';
comment on column budget_recovery.store_loss.found_by is 'The tick or run that found it.';
comment on column budget_recovery.store_loss.verdict is 'recreated, regressed or marker_lost.';
comment on column budget_recovery.store_loss.reason is 'The evidence for the verdict, for people.';
comment on column budget_recovery.store_loss.before_created_at is
    'The store that was lost: when its stream was created.';
comment on column budget_recovery.store_loss.before_last_sequence is
    'The store that was lost: the highest known sequence of its stream.';
comment on column budget_recovery.store_loss.after_created_at is
    'The store that was found: when its stream was created; null: there was none.';
comment on column budget_recovery.store_loss.after_last_sequence is
    'The store that was found: the highest sequence of its stream.';
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
            'unknown', 'first_seen', 'unchanged', 'advanced',
            'recreated', 'regressed', 'marker_lost'
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
    'Comparisons of the store with the baseline: all checks of the sensor, the losses that '
    'captures and restores found, and the new baseline after each recovery. Kept for 30 days; the '
    'newest check that found the store intact is kept longer.';
comment on column budget_recovery.store_check.check_id is 'Ascending in the order of recording.';
comment on column budget_recovery.store_check.checked_at is 'When the store was checked.';
comment on column budget_recovery.store_check.checked_by is 'The tick or run that checked it.';
comment on column budget_recovery.store_check.verdict is
    'unknown, first_seen, unchanged or advanced; or a loss: recreated, regressed, marker_lost.';
comment on column budget_recovery.store_check.reason is 'The evidence for the verdict, for people.';
comment on column budget_recovery.store_check.store_created_at is
    'The observed identity: when the stream was created; null: none was observed.';
comment on column budget_recovery.store_check.store_last_sequence is
    'The observed identity: the highest sequence of the stream.';
comment on column budget_recovery.store_check.incident_id is
    'The incident that the check opened, or that was open.';
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
    'Restore attempts after a loss, recorded before their work begins.';
comment on column budget_recovery.restore_attempt.incident_id is 'The incident.';
comment on column budget_recovery.restore_attempt.loss is 'The position of the loss in it.';
comment on column budget_recovery.restore_attempt.number is
    'From 1 for each loss; a release does not reset it.';
comment on column budget_recovery.restore_attempt.run_id is 'The Dagster run of the attempt.';
comment on column budget_recovery.restore_attempt.holder is
    'The holder of its lease.';
comment on column budget_recovery.restore_attempt.started_at is 'When it was recorded.';
comment on column budget_recovery.restore_attempt.ended_at is
    'When it ended; null: it is running, or its worker died.';
comment on column budget_recovery.restore_attempt.outcome is 'How it ended, for people.';
"""

# A sum adds up any number of usages of up to 20 integer digits, so the bound of one usage does not
# apply to it. Its own bound refuses NaN and Infinity.
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
    -- Finds the row of a restore that ends, to complete it.
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
    'What each restore did to each budget and window: recorded before its first write, and again '
    'at its end. Kept for ever.';
comment on column budget_recovery.restore_audit.audit_id is
    'Ascending in the order of first recording.';
comment on column budget_recovery.restore_audit.at is
    'When the restore of the tenant began; the same in all its rows for the tenant.';
comment on column budget_recovery.restore_audit.run_id is 'The Dagster run that restored.';
comment on column budget_recovery.restore_audit.who is
    'The process that held the lease: "run … on host (pid …)".';
comment on column budget_recovery.restore_audit.why is 'The reason of the restore.';
comment on column budget_recovery.restore_audit.incident_id is
    'The incident that it restored; null: none.';
comment on column budget_recovery.restore_audit.tenant is 'The tenant.';
comment on column budget_recovery.restore_audit.budget_id is 'The budget.';
comment on column budget_recovery.restore_audit.window_token is
    'The window, such as 2026-11-29, 2026-W48, 2026-11, 2026-Q4 or lifetime.';
comment on column budget_recovery.restore_audit.point_at is
    'The newest snapshot that it restored from.';
comment on column budget_recovery.restore_audit.entries is 'Counters in the snapshots.';
comment on column budget_recovery.restore_audit.planned is
    'Counters to raise, by the plan before the first write.';
comment on column budget_recovery.restore_audit.raised is
    'Raised counters; 0 until the restore ends.';
comment on column budget_recovery.restore_audit.kept is 'Counters that were already as high.';
comment on column budget_recovery.restore_audit.skipped is 'Counters that could not be raised.';
comment on column budget_recovery.restore_audit.usage_before is
    'The sum of the live counters before.';
comment on column budget_recovery.restore_audit.usage_after is
    'The sum of the live counters after; until the restore ends, the planned sum.';
comment on column budget_recovery.restore_audit.notes is
    'What was not restored, and why: a list of texts.';
comment on column budget_recovery.restore_audit.finished_at is
    'When the restore ended; null: it is running, or its worker died.';
"""

PREVIEW = """
create table budget_recovery.restore_preview (
    preview_id text collate "C" primary key,
    at timestamptz not null,
    previewed_by text not null,
    tenant text collate "C",
    budget_id text collate "C",
    captured_at timestamptz,
    despite_resets boolean not null,
    store_created_at timestamptz not null,
    store_last_sequence numeric(20) not null,
    is_complete boolean not null,
    constraint preview_id_is_a_uuid check (
        preview_id ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
    ),
    constraint preview_names_are_not_empty check (tenant <> '' and budget_id <> ''),
    constraint preview_budget_is_of_a_tenant check (budget_id is null or tenant is not null),
    constraint preview_sequence_is_uint64 check (
        store_last_sequence between 0 and 18446744073709551615
    )
);
-- The newest, and those that are too old.
create index restore_preview_at on budget_recovery.restore_preview (at);
comment on table budget_recovery.restore_preview is
    'Previews of restores, kept for a day.';
comment on column budget_recovery.restore_preview.preview_id is 'A random id.';
comment on column budget_recovery.restore_preview.at is 'When it was made.';
comment on column budget_recovery.restore_preview.previewed_by is 'The person or run that made it.';
comment on column budget_recovery.restore_preview.tenant is
    'The tenant; null: all tenants.';
comment on column budget_recovery.restore_preview.budget_id is
    'The budget; null: all budgets.';
comment on column budget_recovery.restore_preview.captured_at is
    'The snapshot; null: the recovery point.';
comment on column budget_recovery.restore_preview.despite_resets is
    'Whether resets were to be ignored.';
comment on column budget_recovery.restore_preview.store_created_at is
    'The store that was read: when its stream was created.';
comment on column budget_recovery.restore_preview.store_last_sequence is
    'The store that was read: the highest sequence of its stream.';
comment on column budget_recovery.restore_preview.is_complete is
    'Whether it is complete; an incomplete preview is never used.';
"""

# Lists, as in a content: one row per counter would be too many for a preview of a whole store.
WINDOW = """
create table budget_recovery.restore_preview_window (
    preview_id text collate "C" not null
        references budget_recovery.restore_preview on delete cascade,
    tenant text collate "C" not null,
    budget_id text collate "C" not null,
    window_token text collate "C" not null,
    entities text[] collate "C" not null,
    live numeric[] not null,
    recorded numeric[] not null,
    actions text[] collate "C" not null,
    primary key (preview_id, tenant, budget_id, window_token),
    constraint preview_lists_are_of_one_length check (
        cardinality(entities) = cardinality(live)
        and cardinality(entities) = cardinality(recorded)
        and cardinality(entities) = cardinality(actions)
    )
);
comment on table budget_recovery.restore_preview_window is
    'The plan of a preview for one budget and window.';
comment on column budget_recovery.restore_preview_window.preview_id is 'The preview.';
comment on column budget_recovery.restore_preview_window.tenant is 'The tenant.';
comment on column budget_recovery.restore_preview_window.budget_id is 'The budget.';
comment on column budget_recovery.restore_preview_window.window_token is 'The window.';
comment on column budget_recovery.restore_preview_window.entities is
    'The entities; '''' is the budget''s aggregate.';
comment on column budget_recovery.restore_preview_window.live is
    'The live usages, in the order of entities; null: none, or unreadable.';
comment on column budget_recovery.restore_preview_window.recorded is
    'The recorded usages, in the order of entities.';
comment on column budget_recovery.restore_preview_window.actions is
    'The planned actions, in the order of entities: raise, keep, skip_closed or '
    'skip_unreadable.';
"""

BLOCKS = (INCIDENT, LOSS, CHECK, ATTEMPT, AUDIT, PREVIEW, WINDOW)
"""In the order of their creation; they come after those of ``v1_snapshots``."""
