import pytest

from budget_recovery_dagster.adapters.nats import sequence_and_time


@pytest.mark.parametrize(
    "reply",
    [
        "$JS.ACK.KV_b.consumer.1.42.7.1796000000000000001.3",
        "$JS.ACK.hub.ACCOUNT.KV_b.consumer.1.42.7.1796000000000000001.3",
        "$JS.ACK._.ACCOUNT.KV_b.consumer.1.42.7.1796000000000000001.3.random",
    ],
)
def test_both_forms_contain_the_sequence_and_the_time(reply: str) -> None:
    assert sequence_and_time(reply) == (42, 1796000000000000001)
