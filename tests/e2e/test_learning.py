"""Every estimator makes the bundled model better at mental arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.estimators import ESTIMATORS, FLAGS, GAIN, NUM_STEPS, gain
from tests.e2e.runs import succeeded, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_reward_rises(tmp_path: Path, estimator: str) -> None:
    run = succeeded(train(tmp_path / "run", *FLAGS, "--runtime", "local", "--advantage-estimator", estimator, timeout_s=500))
    rewards = [row["reward/mean"] for row in run.metrics]
    assert len(rewards) == NUM_STEPS
    assert gain(rewards) >= GAIN, [round(reward, 2) for reward in rewards]
