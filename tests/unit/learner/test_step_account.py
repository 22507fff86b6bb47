"""The account of a step: shares of losses over micro-batches, updates and ranks, skipped updates, rates and the share that is done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.core.errors import NonFiniteError
from agentrl.core.metrics import MetricSums
from agentrl.learner.engine import TrainEngine
from agentrl.learner.step import TrainingStep


def step(number: int = 0, *, ranks: int = 1, together: int = 1, rank: int = 0, **learner: Any) -> TrainingStep:
    """A step without models."""
    rates = {"lr_schedule": "linear", "lr_warmup_steps": 0, "min_lr_ratio": 0.0, "learning_rate": 1.0, **learner}
    settings: Any = SimpleNamespace(learner=SimpleNamespace(**rates), num_steps=10, algo=SimpleNamespace(ppo_epochs=2))
    size = ranks // together
    merged = SimpleNamespace(
        data_size=size, first=rank == 0, leads=rank % together == 0, device=torch.device("cpu"), merge=lambda stats: stats
    )
    found: TrainingStep = TrainingStep(number, SimpleNamespace(), settings, merged)  # type: ignore[arg-type]
    return found


def update(number: int = 0, micros: int = 2) -> Any:
    return SimpleNamespace(number=number, micros=(None,) * micros)


@pytest.mark.parametrize("ranks", [1, 2])
def test_shares_of_micro_batches_and_ranks_add_up_and_updates_are_averaged(ranks: int) -> None:
    merged = MetricSums()
    for rank in range(ranks):
        own = step(ranks=ranks, rank=rank)
        for number in range(2):
            for _ in range(2 + rank):  # one rank has more micro-batches than the other
                share = {"loss": torch.tensor((1.0 + number) / (ranks * (2 + rank)))}
                own.record_shares(share, update(number, 2 + rank))
        merged.merge(own.stats)
    assert merged.result()["loss"] == pytest.approx(1.5)


def test_skipped_updates_are_counted_once_and_have_no_norm() -> None:
    first, second = step(ranks=2), step(ranks=2, rank=1)
    for own in (first, second):
        for norm in (None, 4.0, None):
            own.record_update("", 0.5, norm)
        first.stats.merge(second.stats if own is second else MetricSums())
    assert first.stats.result() == {"learning_rate": 0.5, "skipped_updates": 2.0, "grad_norm": 4.0}


def test_a_schedule_begins_where_what_is_trained_does() -> None:
    assert step(4).learning_rate(1.0, 0) == pytest.approx(0.6)
    assert step(4).learning_rate(1.0, 4) == 1.0
    assert step(7).learning_rate(1.0, 4) == pytest.approx(0.5)


class Told:
    """An objective and a policy that note what they are told."""

    host = warmup = 0
    chosen = None

    def __init__(self) -> None:
        self.done: list[float] = []

    def sizes(self, rows: Any) -> None: ...
    def prepare(self, updates: Any) -> None: ...
    def begin_update(self, update: Any) -> None: ...
    def finish(self) -> None: ...


def test_each_update_knows_the_share_of_the_step_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own, told = step(), Told()
    monkeypatch.setattr(own, "lay_out", lambda *given, **named: [update(number) for number in range(4)])
    monkeypatch.setattr(own, "_update_policy", lambda objective, update, done: objective.done.append(done))
    own.train(told)  # type: ignore[arg-type]
    assert told.done == [number / 8 for number in range(8)]


def test_ranks_that_run_the_same_rows_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rank in range(4):
        own = step(ranks=4, together=2, rank=rank)
        own.stats.mean("loss", 1.0, 1.0)
        monkeypatch.setattr(own, "lay_out", lambda *given, **named: [])
        found.append(own.train(Told()).result().get("loss"))  # type: ignore[arg-type]
    assert found == [1.0, None, 1.0, None]


def engine(*norms: float | None) -> TrainEngine:
    """Return an engine whose gradients have these norms."""
    left, unused = list(norms), dict.fromkeys(TrainEngine.__abstractmethods__)
    own = {"optimizer": SimpleNamespace(param_groups=[{}]), "_apply": lambda self: left.pop(0)}
    kind: Any = type("Scripted", (TrainEngine,), {**unused, **own})
    made: TrainEngine = kind(None, None)
    return made


def test_a_run_ends_after_three_skipped_updates_in_a_row() -> None:
    lucky = engine(None, None, 1.0, None, None, 2.0)
    assert [lucky.update(0.5) for _ in range(6)] == [None, None, 1.0, None, None, 2.0]
    assert lucky.optimizer.param_groups == [{"lr": 0.5}]
    unlucky = engine(1.0, None, None, None)
    assert [unlucky.update(0.5) for _ in range(3)] == [1.0, None, None]
    with pytest.raises(NonFiniteError, match="3 updates in a row"):
        unlucky.update(0.5)
