"""Two callbacks: one adds a metric and ends the run when the reward is high enough, the other is a metric sink.

agentrl train --agent envs/arithmetic.py --callback examples/callback.py:StopWhenSolved --callback examples/callback.py:RewardsCsv
"""

import json
from collections import deque
from typing import TextIO

from agentrl import Callback, MetricsRow, RunBegin, RunEnd, StepEnd


class StopWhenSolved(Callback):
    """Adds the moving average of the reward to the metrics, and ends the run when it reaches the target."""

    target = 0.95
    window = 5

    def __init__(self) -> None:
        self.rewards: deque[float] = deque(maxlen=self.window)

    def on_run_begin(self, event: RunBegin) -> None:
        """Read the rewards of the steps before, because the object is new after a resumption."""
        if event.resumed:
            lines = (event.run_dir / "metrics.jsonl").read_text().splitlines()
            self.rewards.extend(row["reward/mean"] for row in map(json.loads, lines) if row["step"])

    def on_step_end(self, event: StepEnd) -> dict[str, float]:
        """Add the average to the metrics."""
        self.rewards.append(event.metrics["reward/mean"])
        average = sum(self.rewards) / len(self.rewards)
        if len(self.rewards) == self.window and average >= self.target:
            self.stop(f"mean reward of {self.window} steps is {average:.3f}")
        return {"reward/moving_average": average}


class RewardsCsv(Callback):
    """Writes the reward of every step to ``rewards.csv`` in the run directory."""

    file: TextIO

    def on_run_begin(self, event: RunBegin) -> None:
        """Open the file."""
        self.file = (event.run_dir / "rewards.csv").open("a")

    def on_metrics(self, event: MetricsRow) -> None:
        """Write a line; the metrics of other callbacks are there already."""
        if event.step:
            print(event.step, event.metrics["reward/mean"], event.metrics["reward/moving_average"], sep=",", file=self.file, flush=True)

    def on_run_end(self, event: RunEnd) -> None:
        """Close the file."""
        self.file.close()
