"""``budget-recovery doctor`` on the bucket's configuration, and on clocks."""

import re
from datetime import datetime, timedelta
from typing import Any

import pytest
from nats.js.api import (
    RePublish,
    StreamConfig,
    StreamConsumerLimits,
    StreamSource,
    SubjectTransform,
)

from budget_recovery_dagster.embedded import NatsServer
from tests.integration.doctor_command import NATS_URL, doctor, require_skipped, untouched
from tests.integration.recovery_harness import Harness
from tests.nats_servers import Bucket, DisturbedNetwork


def test_a_missing_bucket_is_reported(configured: Bucket) -> None:
    checked = doctor(BUDGET_RECOVERY_BUCKET="another")
    assert checked.failed == {"bucket_exists"}
    assert checked["bucket_exists"]["message"] == "The bucket another does not exist."
    require_skipped(checked, "bucket_kind", "bucket_replicas", "bucket_read")
    # Permissions are checked even without a bucket.
    assert checked["permission_raise_counters"]["outcome"] == "ok"


OTHER = "another-stream"


@pytest.mark.parametrize(
    ("settings", "outcome", "message"),
    [
        ({"sources": [StreamSource(OTHER)]}, "fail", "has sources."),
        (
            {
                "sources": [
                    StreamSource(
                        OTHER,
                        subject_transforms=[SubjectTransform("other.*", "kept.{{wildcard(1)}}")],
                    )
                ]
            },
            "fail",
            "has sources.",
        ),
        ({"mirror": StreamSource(OTHER), "subjects": None}, "fail", "has mirror."),
        ({"subject_transform": SubjectTransform("", "other.>")}, "fail", "has subject_transform."),
        ({"republish": RePublish(dest="copy.>")}, "ok", "subscribers of copy.> also receive"),
    ],
    ids=["sources", "transformed sources", "mirror", "subject transform", "republish"],
)
def test_what_else_fills_or_copies_the_bucket_is_judged(
    configured: Bucket, settings: dict[str, Any], outcome: str, message: str
) -> None:
    subjects = {"subjects": [configured.subject(">")]}
    configured.destroy()
    configured._do(lambda js: js.add_stream(StreamConfig(OTHER, subjects=["other.*"])))
    try:
        config = StreamConfig(configured.stream, **subjects | settings)
        configured._do(lambda js: js.add_stream(config))
        checked = doctor()
    finally:
        configured._do(lambda js: js.delete_stream(OTHER))
    assert checked["bucket_kind"]["outcome"] == outcome
    assert message in checked["bucket_kind"]["message"]
    (setting,) = settings.keys() - {"subjects"}
    assert checked["bucket_kind"]["facts"][setting]


@pytest.mark.parametrize(
    ("settings", "check", "outcome", "code", "message"),
    [
        ({"storage": "memory"}, "bucket_storage", "warn", "memory_storage", "Memory"),
        ({"max_age": 3 * 86400}, "bucket_max_age", "warn", "shorter_than_window", "for 3 days,"),
        (
            {"max_msgs_per_subject": -1},
            "bucket_history",
            "warn",
            "unlimited_history",
            "every earlier",
        ),
        (
            {"max_bytes": 10**6, "discard": "old"},
            "bucket_limits",
            "warn",
            "discards_old",
            "the oldest",
        ),
        ({"max_bytes": 540}, "bucket_limits", "fail", "almost_full", "refuses writes"),
        ({"max_msg_size": 500}, "bucket_value_size", "warn", "values_too_small", "500 bytes"),
        ({"subjects": ["other.>"]}, "bucket_kind", "fail", "not_a_bucket", "other.>"),
        (
            {"retention": "interest"},
            "bucket_kind",
            "fail",
            "unusable_settings",
            "retention interest",
        ),
        ({"sealed": True}, "bucket_kind", "fail", "unusable_settings", "sealed"),
        (
            {"consumer_limits": StreamConsumerLimits(inactive_threshold=10)},
            "bucket_consumers",
            "fail",
            "idle_limit_too_short",
            "idle for 10 s, but a read needs 30 s",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value)[:20],
)
def test_settings_of_the_bucket_are_checked(
    configured: Bucket, settings: dict[str, Any], check: str, outcome: str, code: str, message: str
) -> None:
    configured.destroy()
    is_sealed = settings.pop("sealed", False)
    if "subjects" in settings:
        config = StreamConfig(configured.stream, **settings)
        configured._do(lambda js: js.add_stream(config))
    else:
        configured.create_with(**settings)
        configured.put("other", b"0123456789" * 45)
    if is_sealed:
        configured.reconfigure(sealed=True)
    with untouched(configured):
        checked = doctor()
    assert (checked[check]["outcome"], checked[check]["code"]) == (outcome, code)
    assert message in checked[check]["message"]
    # A read of a stream that refuses our consumer fails too.
    others = {"bucket_read"} if check == "bucket_consumers" else set()
    assert checked.failed - others == ({check} if outcome == "fail" else set())
    assert others <= checked.failed


def test_a_bucket_whose_keys_no_longer_expire_is_reported(harness: Harness) -> None:
    assert doctor()["bucket_ttl"]["message"] == "keys may have a TTL"
    harness.bucket.put("usage.acme.users.lifetime.=", b"5")
    harness.capture()
    harness.bucket.destroy()
    harness.bucket.create_with()
    checked = doctor()["bucket_ttl"]
    assert (checked["outcome"], checked["facts"]) == ("ok", {"allow_msg_ttl": False})

    harness.bucket.destroy()
    harness.bucket.create()
    harness.bucket.put("usage.acme.users.lifetime.=", b"5", {"Nats-TTL": "86400"})
    harness.find_loss()
    harness.recover()
    harness.capture(harness.clock.time + timedelta(hours=1))
    harness.bucket.destroy()
    harness.bucket.create_with()
    checked = doctor()["bucket_ttl"]
    assert (checked["outcome"], checked["code"]) == ("warn", "no_key_ttl")
    assert "Captured keys of open windows had a TTL" in checked["message"]
    assert "allow_msg_ttl" in checked["hint"]


@pytest.mark.parametrize(
    ("ttl", "outcome"), [("86400", "warn"), ("never", "ok")], ids=["expires", "protected"]
)
def test_keys_whose_expiries_differ_are_reported_if_one_of_them_expired(
    harness: Harness, ttl: str, outcome: str
) -> None:
    harness.bucket.put("usage.acme.users.lifetime.=", b"5", {"Nats-TTL": ttl})
    harness.bucket.put("usage.acme.users.lifetime.bob", b"5")
    harness.capture()
    harness.bucket.destroy()
    harness.bucket.create_with()
    assert doctor()["bucket_ttl"]["outcome"] == outcome


@pytest.mark.parametrize(
    ("seconds", "blocks"),
    [(30, ["restore"]), (-90, ["capture", "restore"])],
)
def test_clocks_that_disagree_are_reported(
    configured: Bucket, nats_server: NatsServer, seconds: int, blocks: list[str]
) -> None:
    def shift(answer: bytes) -> bytes:
        return re.sub(
            rb'(?<="ts":")[^"]{19}',
            lambda time: (
                (datetime.fromisoformat(time[0].decode()) + timedelta(seconds=seconds))
                .isoformat()
                .encode()
            ),
            answer,
        )

    with DisturbedNetwork(nats_server.url) as network:
        network.rewrite = shift
        checked = doctor(**{NATS_URL: network.url})
    assert checked.failed == {"store_clock"}
    of_store = checked["store_clock"]
    assert of_store["facts"]["blocks"] == blocks
    assert (of_store["facts"]["skew_seconds"] > 0) is (seconds > 0)
    assert ("ahead of" if seconds > 0 else "behind") in of_store["message"]
