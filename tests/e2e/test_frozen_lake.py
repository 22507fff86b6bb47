"""Learning on the real stack: a gymnasium environment, against random play."""

from pathlib import Path

import pytest

from tests.benchmarks.random_play import play
from tests.e2e.runs import succeeded, train

LAKE = "gym:FrozenLake-v1?is_slippery=False"
MARGIN = 0.25  # as docs/benchmarks.md promises; 40 steps do for it


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_training_beats_random_play_on_the_frozen_lake(tmp_path: Path) -> None:
    random_score = sum(play(LAKE, 16, seed)[1] for seed in range(1000)) / 1000
    assert random_score < 0.03
    arguments = ("--groups-per-step", "4", "--n-samples-per-prompt", "32", "--max-turns", "16", "--max-new-tokens", "8", "--seed", "0")
    run = succeeded(train(tmp_path / "run", "--runtime", "local", "--num-steps", "40", *arguments, agent=LAKE, timeout_s=1100))
    last = [row["score/mean"] for row in run.metrics[-5:]]
    assert sum(last) / 5 >= random_score + MARGIN
    assert run.metrics[-1]["env/invalid_action"] < 0.5
