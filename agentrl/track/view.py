"""What the displays show of a run, kept up to date by the observer's calls and read by whoever draws."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping

from agentrl.core.summaries import GroupSummary
from agentrl.track.summary import first_and_last
from agentrl.track.text import mean
from agentrl.track.visible import visible

ETA_STEPS = 10
MAX_ERRORS = 5


class RunView:
    """State of one run as a person sees it.

    Args:
        num_steps: Optimizer steps that the run is to take.
        clock: Seconds, monotonic.

    Attributes:
        stages: Finished stages with their seconds, oldest first.
        stage: The stage that is going on, "" while training.
        rewards: Mean reward of every step.
        latest: Metrics of the newest step.
        groups: Attempts at groups that finished.
        failed: Episodes that failed, by status.
        errors: Distinct messages of failed episodes, the first few.
    """

    def __init__(self, num_steps: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_steps, self._clock = num_steps, clock
        self.started_s = self._stage_s = clock()
        self.stages: list[tuple[str, float]] = []
        self.stage = ""
        self.rewards: list[float] = []
        self.latest: Mapping[str, float] = {}
        self.groups = 0
        self.failed: Counter[str] = Counter()
        self.errors: list[str] = []
        self._step_ends: list[float] = []

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run started."""
        return self._clock() - self.started_s

    @property
    def stage_s(self) -> float:
        """Seconds that the current stage has lasted."""
        return self._clock() - self._stage_s

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.latest.get("step", 0))

    @property
    def eta_s(self) -> float:
        """Seconds left at the pace of the latest steps; NaN before the second step."""
        ends = self._step_ends
        pace = mean([later - earlier for earlier, later in itertools.pairwise(ends)])
        return pace * max(0, self.num_steps - self.step)

    @property
    def trend(self) -> float:
        """Mean reward of the last few steps minus that of the first few; NaN without a step."""
        first, last = first_and_last(self.rewards)
        return last - first

    def on_stage(self, name: str) -> None:
        """End the current stage and begin `name`."""
        self._end_stage()
        self.stage, self._stage_s = name, self._clock()

    def on_group(self, summary: GroupSummary) -> list[str]:
        """Count a finished attempt; returns messages of failures not seen before."""
        if not self.rewards:
            self._end_stage()
        self.groups += 1
        failed = [episode[0] for episode in summary.episodes if episode[0].status.failed]
        self.failed.update(str(member.status) for member in failed)
        messages = dict.fromkeys(f"{member.status}: {visible(member.error or 'no message')}" for member in failed)
        fresh = [text for text in messages if text not in self.errors][: MAX_ERRORS - len(self.errors)]
        self.errors += fresh
        return fresh

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of a finished step."""
        self._end_stage()
        self.latest = dict(metrics)
        self.rewards.append(float(metrics.get("reward/mean", float("nan"))))
        self._step_ends = [*self._step_ends[-ETA_STEPS:], self._clock()]

    def _end_stage(self) -> None:
        if self.stage:
            self.stages.append((self.stage, self.stage_s))
            self.stage = ""
