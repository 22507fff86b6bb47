"""The engines' load in the metrics of a step."""

from __future__ import annotations

import pytest

from agentrl.core.protocols import EngineLoad, EngineStats, LoadSums
from agentrl.flow.metrics import _engines


def stats(sums: LoadSums, clock_s: float) -> EngineStats:
    return EngineStats(clock_s=clock_s, sums=sums)


def test_load_is_a_mean_over_the_time_in_which_episodes_were_under_way() -> None:
    one, two = EngineLoad(running=4, waiting=2, kv_usage=0.5), EngineLoad(running=4, waiting=0, kv_usage=0.1)
    begin = LoadSums().plus(one, 100, 50.0)
    before = {"engine-0": stats(begin, 60.0), "engine-1": stats(LoadSums(), 60.0)}
    after = {"engine-0": stats(begin.plus(two, 8, 3.0), 70.0), "engine-1": stats(LoadSums().plus(one, 16, 1.0), 70.0)}
    metrics = _engines(before, after, 10.0)
    assert metrics["engine/kv_usage"] == pytest.approx((0.1 * 3 + 0.5) / 4)
    assert metrics["engine/waiting"] == pytest.approx(2 / 4)
    assert metrics["engine/concurrency"] == pytest.approx((8 * 3 + 16) / 4)


def test_without_an_episode_nothing_is_said() -> None:
    still = {"engine-0": stats(LoadSums(), 1.0)}
    assert "engine/waiting" not in _engines(still, {"engine-0": stats(LoadSums(), 2.0)}, 1.0)
