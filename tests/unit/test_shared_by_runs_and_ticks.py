"""What runs and ticks share: a log that fails no work, and the recognition of a dry run."""

import pytest

from budget_recovery_dagster.resources import is_dry_run, never_failing


class Log:
    """A run's log whose database may be away."""

    def __init__(self) -> None:
        self.is_away = False
        self.tries = 0
        self.sentences: list[str] = []

    def info(self, sentence: str, **_: object) -> None:
        self.tries += 1
        if self.is_away:
            raise ConnectionError("the server closed the connection")
        self.sentences.append(sentence)


def test_a_log_that_cannot_be_stored_fails_no_work(caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    show = never_failing(log.info)
    show("1 of 3")
    log.is_away = True
    show("2 of 3")
    show("3 of 3")
    assert log.sentences == ["1 of 3"]
    # Not tried again at once: each try takes seconds.
    assert log.tries == 2
    assert [record.getMessage() for record in caplog.records] == [
        "Dagster's database does not answer: 2 of 3",
        "Dagster's database does not answer: 3 of 3",
    ]


def test_a_terminated_run_is_interrupted_while_it_logs() -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        never_failing(interrupted)("1 of 3")


@pytest.mark.parametrize(
    ("log_key", "expected"),
    [
        # The daemon ends it with the number of the tick that it has recorded.
        (["__repository__", "store_loss_sensor", "17"], False),
        (["__repository__", "store_loss_sensor", "20261202"], False),
        # A tick of a preview is not recorded.
        (["__repository__", "store_loss_sensor", "20261202_135600"], True),
        # A form that is not known yet: a loss must not go undetected.
        (["__repository__", "store_loss_sensor", "0b4f9d62-8a2e"], False),
        # A call in Python.
        (None, False),
    ],
)
def test_a_dry_run_is_recognized_by_its_log_key(
    log_key: list[str] | None, *, expected: bool
) -> None:
    assert is_dry_run(log_key) is expected
