"""Two agents learn to split a pile, on the real stack."""

from pathlib import Path

import pytest

from tests.e2e.runs import ENVS, succeeded, train

MARGIN = 0.3  # as docs/benchmarks.md promises


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_raises_what_two_agents_gain(tmp_path: Path) -> None:
    sizes = ("--num-steps", "40", "--groups-per-step", "8", "--n-samples-per-prompt", "16", "--max-new-tokens", "8", "--seed", "1")
    run = succeeded(train(tmp_path / "run", "--runtime", "local", *sizes, agent=ENVS / "negotiation.py", timeout_s=800))
    gains = [row["env/gain"] for row in run.metrics]
    assert sum(gains[-5:]) / 5 >= sum(gains[:5]) / 5 + MARGIN, gains
    last = run.metrics[-1]
    assert last["episode/count"] == 8 * 16
    assert last["reward/ann"] + last["reward/bob"] <= 1.0
    assert run.summary["ledger"]["trained"] == 40 * 8
