from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config.methods import METHODS
from agentrl.config.tune import TuneEvalConfig, TuneRunConfig
from agentrl.core.callbacks import Callback, MetricsRow
from agentrl.tune.follow import Best, Follower, Rows, Stop


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
    found.measured(0, {"eval_loss": 0.7, "eval_accuracy": 0.5, "eval_runtime": 2.0, "eval_samples_per_second": 9.0})
    found.trained(1, {"loss": 0.6, "grad_norm": 2.0, "margin": 0.1, "num_input_tokens_seen": 30, "unknown": 1.0}, 3.0)
    found.trained(2, {"loss": 0.5}, 4.0)
    assert found.measured(2, {"eval_loss": 0.4, "eval_margin": 0.3}) == {"loss": 0.4, "margin": 0.3}
    found.note(**{"eval/best": 0.4})
    found.flush()
    found.flush()
    assert [step for step, _ in sink.rows] == [0, 1, 2]
    assert sink.rows[0][1] == {"step": 0, "eval/loss": 0.7, "eval/accuracy": 0.5, "eval/seconds": 2.0}
    assert sink.rows[1][1] == {"step": 1, "epoch": 0.2, "loss": 0.6, "grad_norm": 2.0, "margin": 0.1, "tokens": 30.0, "time_s": 3.0}
    assert sink.rows[2][1] == {"step": 2, "epoch": 0.4, "loss": 0.5, "time_s": 4.0, "eval/loss": 0.4, "eval/margin": 0.3, "eval/best": 0.4}


def test_an_evaluation_of_another_step_is_a_row_of_its_own(sink: Sink):
    found = rows(sink)
    found.trained(1, {"loss": 0.6}, 3.0)
    found.measured(2, {"eval_loss": 0.4})
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


def control() -> Any:
    return SimpleNamespace(should_log=False, should_evaluate=False, should_save=False, should_training_stop=False)


def follower(sink: Sink, stop: Stop | None = None, *, save_every: int = 0, eval_every: int = 0, evaluates: bool = True) -> Follower:
    often = TuneRunConfig(save_every=save_every), TuneEvalConfig(eval_every=eval_every)
    return Follower(rows(sink), Best("", Path("best")), stop or Stop(), *often, evaluates=evaluates, clock=lambda: 1.0)


def decided(each: Follower, last: int) -> list[str]:
    """What follows each step: log, evaluate, save, end."""
    found = []
    for step in range(1, last + 1):
        after = each.on_step_end(None, SimpleNamespace(global_step=step, max_steps=last), control())
        letters = {"l": after.should_log, "e": after.should_evaluate, "s": after.should_save, "x": after.should_training_stop}
        found.append("".join(letter for letter, given in letters.items() if given))
    return found


def test_checkpoints_and_evaluations_come_as_often_as_asked_and_at_the_end(sink: Sink):
    assert decided(follower(sink, save_every=2, eval_every=3), 5) == ["l", "ls", "le", "ls", "les"]
    assert decided(follower(sink), 2) == ["l", "le"]
    assert decided(follower(sink, evaluates=False), 2) == ["l", "l"]


def test_a_request_to_stop_saves_and_ends_but_not_after_the_last_step(sink: Sink):
    stop = Stop()
    stop.asked = True
    each = follower(sink, stop)
    assert decided(each, 1) == ["le"]
    assert not each.stopped
    assert decided(each, 2)[0] == "lsx"
    assert each.stopped


def test_evaluations_that_are_no_better_end_the_run(sink: Sink, monkeypatch: pytest.MonkeyPatch):
    saved: list[Path] = []
    monkeypatch.setattr("agentrl.tune.follow.save_model", lambda trainer, folder: saved.append(folder))
    often = TuneRunConfig(save_every=5), TuneEvalConfig(eval_every=1, early_stopping=2)
    each = Follower(rows(sink), Best("loss", Path("best")), Stop(), *often, evaluates=True, clock=lambda: 1.0)
    ended = []
    for step, loss in enumerate((0.7, 0.5, 0.6, 0.4, 0.4, 0.6), start=1):
        after = control()
        each.on_log(None, SimpleNamespace(global_step=step, max_steps=9), after, {"eval_loss": loss})
        ended.append((after.should_training_stop, after.should_save))
    assert ended == [(False, False)] * 5 + [(True, True)]
    assert each.settled
    assert len(saved) == 3


def test_the_last_evaluation_ends_nothing_early(sink: Sink):
    often = TuneRunConfig(), TuneEvalConfig(eval_every=1, early_stopping=1)
    each = Follower(
        rows(sink), Best("loss", Path("best"), [{"step": 0, "eval/loss": 0.1}]), Stop(), *often, evaluates=True, clock=lambda: 1.0
    )
    each.on_log(None, SimpleNamespace(global_step=3, max_steps=3), control(), {"eval_loss": 0.2})
    assert not each.settled
