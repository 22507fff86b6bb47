from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from agentrl.learner.engine import learning_rate

COMMON: dict[str, Any] = {"peak": 2.0, "warmup_steps": 4, "num_steps": 14, "min_ratio": 0.1}


def rates(schedule: Any, **changes: Any) -> list[float]:
    return [learning_rate(step, schedule=schedule, **COMMON | changes) for step in range(20)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_rises_linearly_to_the_peak(schedule: str) -> None:
    assert rates(schedule)[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_constant_stays() -> None:
    assert rates("constant")[4:] == [2.0] * 16


def test_linear_ends_at_the_floor_behind_the_last_step_and_stays_there() -> None:
    values = rates("linear")
    steps = [a - b for a, b in pairwise(values[4:15])]
    assert steps == pytest.approx([0.18] * 10)
    assert values[14:] == pytest.approx([0.2] * 6)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_last_step_trains(schedule: str) -> None:
    assert learning_rate(13, schedule=schedule, **COMMON | {"min_ratio": 0.0}) > 0.01 * COMMON["peak"]  # type: ignore[arg-type]
    assert learning_rate(0, schedule=schedule, peak=2.0, warmup_steps=0, num_steps=1, min_ratio=0.0) == 2.0  # type: ignore[arg-type]


@pytest.mark.parametrize(("schedule", "named"), [("linear", "linear"), ("cosine", "cosine"), ("constant", "constant_with_warmup")])
@pytest.mark.parametrize("warmup", [0, 4])
def test_schedules_are_those_of_transformers_after_the_warm_up_which_is_a_step_ahead(schedule: str, named: str, warmup: int) -> None:
    weights = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weights], lr=2.0)
    theirs = get_scheduler(named, optimizer, num_warmup_steps=warmup, num_training_steps=14)
    found = []
    for _ in range(14):
        found.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    ours = rates(schedule, warmup_steps=warmup, min_ratio=0.0)[:14]
    assert ours[warmup:] == pytest.approx(found[warmup:])
    assert ours[:warmup] == pytest.approx(found[1 : warmup + 1])


def test_cosine_is_half_way_in_the_middle() -> None:
    values = rates("cosine")
    assert values[9] == pytest.approx(0.5 * (2.0 + 0.2))
    assert values[14:] == pytest.approx([0.2] * 6)
    assert values[4:15] == sorted(values[4:15], reverse=True)


def test_no_warm_up_starts_at_the_peak() -> None:
    assert rates("linear", warmup_steps=0)[0] == 2.0
