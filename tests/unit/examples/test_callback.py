"""The example of a callback, loaded as the command line loads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.core.callbacks import MetricsRow, RunBegin, RunEnd, StepEnd
from agentrl.track.callbacks import UserCallbacks, load_callbacks

EXAMPLE = Path(__file__).parents[3] / "examples" / "callback.py"


@pytest.mark.anyio
async def test_the_example_averages_stops_and_writes(tmp_path: Path) -> None:
    asked: list[str] = []
    users = UserCallbacks(load_callbacks([f"{EXAMPLE}:StopWhenSolved", f"{EXAMPLE}:RewardsCsv"]), ask_stop=asked.append)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "reward/mean": 0.5}\n')
    await users.tell(RunBegin(config={}, run_dir=tmp_path, resumed=True, step=1))
    averages = []
    for step in range(2, 7):
        metrics = {"reward/mean": 1.0}
        metrics |= await users.tell(StepEnd(step=step, metrics=metrics))
        averages.append(metrics["reward/moving_average"])
        assert bool(asked) is (step == 6)
        await users.tell(MetricsRow(step=step, metrics=metrics))
    await users.tell(RunEnd(status="interrupted", summary={}))
    assert averages == pytest.approx([0.75, 2.5 / 3, 0.875, 0.9, 1.0])
    assert asked == ["StopWhenSolved: mean reward of 5 steps is 1.000"]
    assert (tmp_path / "rewards.csv").read_text().splitlines()[0] == "2,1.0,0.75"
