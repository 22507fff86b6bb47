from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config.methods import METHODS
from agentrl.core.callbacks import Callback, MetricsRow
from agentrl.tune.follow import Best, Rows


class Sink(Callback):
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def on_metrics(self, event: MetricsRow) -> None:
        self.rows.append((event.step, dict(event.metrics)))


@pytest.fixture
def sink() -> Sink:
    return Sink()


def rows(sink: Sink) -> Rows:
    return Rows(METHODS["dpo"], [sink], epoch_rows=40, batch_size=8)


def test_a_step_and_its_evaluation_are_one_row(sink: Sink):
    found = rows(sink)
    found.measured(0, {"loss": 0.7, "accuracy": 0.5, "padding": 9.0}, seconds=2.0)
    rewards = {"reward/chosen": 0.5, "reward/rejected": 0.25}
    learner = {"tokens/saved": 7.0, "padding": 0.1, "time/train_s": 2.5, "memory/process_gib": 1.5}
    found.trained(1, {"loss": 0.6, "grad_norm": 2.0, "unknown": 1.0, **rewards, **learner}, tokens=30.0, seconds=3.0)
    found.trained(2, {"loss": 0.5}, tokens=50.0, seconds=4.0)
    assert found.measured(2, {"loss": 0.4, "margin": 0.3}, seconds=1.0) == {"loss": 0.4, "margin": 0.3}
    found.note(**{"eval/best": 0.4})
    found.flush()
    found.flush()
    assert [step for step, _ in sink.rows] == [0, 1, 2]
    assert sink.rows[0][1] == {"step": 0, "eval/loss": 0.7, "eval/accuracy": 0.5, "eval/seconds": 2.0}
    first = {"step": 1, "epoch": 0.2, "loss": 0.6, "grad_norm": 2.0, "margin": 0.25, "tokens": 30.0, "time_s": 3.0}
    assert sink.rows[1][1] == {**first, **rewards, **learner}
    after = {"eval/loss": 0.4, "eval/margin": 0.3, "eval/best": 0.4, "eval/seconds": 1.0}
    assert sink.rows[2][1] == {"step": 2, "epoch": 0.4, "loss": 0.5, "time_s": 4.0, "tokens": 50.0, **after}


def test_an_evaluation_of_another_step_is_a_row_of_its_own(sink: Sink):
    found = rows(sink)
    found.trained(1, {"loss": 0.6}, tokens=1.0, seconds=3.0)
    found.measured(2, {"loss": 0.4}, seconds=1.0)
    found.flush()
    assert [(step, "loss" in row, "eval/loss" in row) for step, row in sink.rows] == [(1, True, False), (2, False, True)]


def test_the_best_loss_is_the_lowest_and_the_best_accuracy_the_highest():
    loss = Best("loss", Path("best"))
    assert [loss.better({"loss": value}) for value in (0.5, 0.6, float("nan"), 0.4)] == [0.5, None, None, 0.4]
    before = [
        {"step": 0, "eval/loss": 1.0, "eval/accuracy": 0.5},
        {"step": 1, "loss": 1.0},
        {"step": 2, "eval/loss": 1.0, "eval/accuracy": 0.3},
    ]
    accuracy = Best("eval/accuracy", Path("best"), before)
    assert accuracy.since == 1
    assert [accuracy.better({"accuracy": value}) for value in (0.4, 0.5, 0.6)] == [None, None, 0.6]
    assert accuracy.since == 0
    assert Best("", Path("best")).better({"loss": 0.1}) is None
    assert loss.better({"accuracy": 1.0}) is None
