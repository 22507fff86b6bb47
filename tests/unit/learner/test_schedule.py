from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from agentrl.learner.engine import learning_rate

COMMON: dict[str, Any] = {"peak": 2.0, "warmup_steps": 4, "num_steps": 14, "min_ratio": 0.1}


def rates(schedule: Any, **changes: Any) -> list[float]:
    return [learning_rate(step, schedule=schedule, **COMMON | changes) for step in range(20)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_rises_linearly_to_the_peak(schedule: str) -> None:
    assert rates(schedule)[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_constant_stays() -> None:
    assert rates("constant")[4:] == [2.0] * 16


def test_linear_ends_at_the_floor_in_the_last_step_and_stays_there() -> None:
    values = rates("linear")
    steps = [a - b for a, b in pairwise(values[4:14])]
    assert steps == pytest.approx([0.2] * 9)
    assert values[13:] == pytest.approx([0.2] * 7)


def test_cosine_is_half_way_in_the_middle() -> None:
    values = rates("cosine", num_steps=15)
    assert values[9] == pytest.approx(0.5 * (2.0 + 0.2))
    assert values[14:] == pytest.approx([0.2] * 6)
    assert values[4:15] == sorted(values[4:15], reverse=True)


def test_no_warm_up_starts_at_the_peak() -> None:
    assert rates("linear", warmup_steps=0)[0] == 2.0
