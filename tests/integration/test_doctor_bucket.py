"""``budget-recovery doctor`` on the bucket's configuration, and on clocks."""

import re
from datetime import datetime, timedelta
from typing import Any

import pytest
from nats.js.api import StreamConfig, StreamConsumerLimits

from budget_recovery_dagster.sandbox.nats_server import NatsServer
from tests.integration.doctor_command import NATS_URL, doctor, require_unseen, untouched
from tests.nats_servers import Bucket, DisturbedNetwork


def test_a_bucket_that_is_not_there_is_named(configured: Bucket) -> None:
    told = doctor(BUDGET_RECOVERY_BUCKET="another")
    assert told.wrong == {("bucket", "existence")}
    assert told["bucket", "existence"]["found"] == "The bucket another does not exist."
    require_unseen(told, "bucket", "kind", "replicas", "a reading")
    # Whether one may is known all the same.
    assert told["permissions", "raising counters"]["state"] == "ok"


@pytest.mark.parametrize(
    ("settings", "name", "state", "found"),
    [
        ({"storage": "memory"}, "storage", "advice", "In memory"),
        ({"max_age": 3 * 86400}, "expiry", "advice", "for 3 days is dropped"),
        ({"max_msgs_per_subject": -1}, "history", "advice", "Every former value"),
        ({"max_bytes": 10**6, "discard": "old"}, "room", "advice", "the oldest counters are"),
        ({"max_bytes": 540}, "room", "wrong", "writings are refused"),
        ({"max_msg_size": 500}, "size of values", "advice", "500 bytes at most"),
        ({"subjects": ["other.>"]}, "kind", "wrong", "no key-value bucket"),
        ({"retention": "interest"}, "kind", "wrong", "the retention interest"),
        ({"sealed": True}, "kind", "wrong", "sealed set"),
        (
            {"consumer_limits": StreamConsumerLimits(inactive_threshold=10)},
            "consumers",
            "wrong",
            "for more than 10 s, and a reading asks for 30 s",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value)[:20],
)
def test_settings_of_the_bucket_are_judged(
    configured: Bucket, settings: dict[str, Any], name: str, state: str, found: str
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
        config = configured.info().config
        config.sealed = True
        configured._do(lambda js: js.update_stream(config))
    with untouched(configured):
        told = doctor()
    assert told["bucket", name]["state"] == state
    assert found in told["bucket", name]["found"]
    # A sealed stream says so itself, and so does one that lets no consumer of ours be.
    others = {("bucket", "a reading")} if name == "consumers" else set()
    assert told.wrong - others == ({("bucket", name)} if state == "wrong" else set())
    assert others <= told.wrong


@pytest.mark.parametrize(
    ("seconds", "then"),
    [(30, "nothing is restored."), (-90, "nothing is captured or restored.")],
)
def test_clocks_that_disagree_are_named(
    configured: Bucket, nats_server: NatsServer, seconds: int, then: str
) -> None:
    def shift(answer: bytes) -> bytes:
        return re.sub(
            rb'(?<="ts":")[^"]{19}',
            lambda told: (
                (datetime.fromisoformat(told[0].decode()) + timedelta(seconds=seconds))
                .isoformat()
                .encode()
            ),
            answer,
        )

    with DisturbedNetwork(nats_server.url) as network:
        network.rewrite = shift
        told = doctor(**{NATS_URL: network.url})
    assert told.wrong == {("clocks", "of the store")}
    of_store = told["clocks", "of the store"]
    assert of_store["found"].endswith(then)
    assert ("ahead of" if seconds > 0 else "behind") in of_store["found"]
