"""Recorded times of a run: where the time of a step went, and how fast it could be at best."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from agentrl.core.errors import ConfigError
from agentrl.flow.sizes import FlowPlan

Row: TypeAlias = Mapping[str, Any]

MIN_STEPS = 3
SHORT_WAIT = 0.05
"""Share of a step that a wait for an evaluation may be of, in a step that tells of the run's pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A run's times.

    Attributes:
        settings: Plan of the run's loops.
        num_learners: Learner ranks.
        rows: Metrics of the steps that tell of its pace, see `paced`.
        evaluations: Times of its evaluations, see `evaluation_times`; empty if there were none.
    """

    settings: FlowPlan
    num_learners: int
    rows: Sequence[Row]
    evaluations: Mapping[str, float] = field(default_factory=dict)

    def mean(self, name: str, default: float = 0.0) -> float:
        """Mean of a metric over the steps that have it."""
        values = [float(row[name]) for row in self.rows if row.get(name) is not None]
        return statistics.fmean(values) if values else default

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self.mean("time/step_s")

    @property
    def episodes_per_s(self) -> float:
        """Episodes trained on per second."""
        return self.mean("group/count") * self.settings.n_samples_per_prompt / self.step_s


def read_recorded(metrics: Sequence[Row], *, settings: FlowPlan, num_learners: int) -> Recorded:
    """Take times from the rows of ``metrics.jsonl``.

    Raises:
        ConfigError: If there are too few steps to say anything.
    """
    rows = paced(metrics, settings.max_staleness)
    if len(rows) < MIN_STEPS:
        remedy = "Let the run take more steps: those in which the line fills, and those after an evaluation, are left out."
        raise ConfigError("RUN", f"{len(rows)} steps", f"tells too little: a profile needs at least {MIN_STEPS} steady steps", remedy)
    return Recorded(settings=settings, num_learners=num_learners, rows=rows, evaluations=evaluation_times(metrics))


def paced(metrics: Sequence[Row], max_staleness: int) -> list[Row]:
    """Return the steps whose length tells of the run's pace: not the first, which fill the queue, and none after an evaluation.

    An evaluation beside a step delays its export, and so the step behind it, which is left out too.
    """
    steps = [row for row in metrics if row.get("step") and row.get("time/step_s") is not None]
    first = min(max_staleness + 1, len(steps) // 3)
    if any("eval/engines" in row for row in metrics):  # engines of their own: only a wait makes a step longer
        return [row for row in steps[first:] if row.get("eval/wait_s", 0.0) <= SHORT_WAIT * row["time/step_s"]]
    evaluated = {row["step"] for row in metrics if "eval/tasks" in row}
    evaluated |= {row["step"] for row in metrics if "eval/wait_s" in row}
    return [row for row in steps[first:] if row["step"] - 1 not in evaluated]


def evaluation_times(metrics: Sequence[Row]) -> Mapping[str, float]:
    """Return ``count``, and means, of evaluations between two steps.

    These are ``seconds``, and ``wait_s``, those for which the learner waited. With engines of their own also ``engines``, and ``used``, the
    share of the run's time in which these evaluated.
    """
    last = max((row["step"] for row in metrics), default=0)
    evaluated = [row for row in metrics if "eval/tasks" in row and row["step"]]
    between = [row for row in evaluated if row["step"] < last]
    waited = {row["step"]: float(row["eval/wait_s"]) for row in metrics if "eval/wait_s" in row}
    if not between:
        return {}

    def waits(row: Row) -> float:
        if "eval/engines" not in row:
            return waited.get(row["step"] + 1, float(row.get("eval/seconds") or 0.0))
        return sum(waited.get(step, 0.0) for step in {row["eval/step"] + 1, row["step"] + 1})

    times = {
        "count": float(len(between)),
        "seconds": statistics.fmean(float(row.get("eval/seconds") or 0.0) for row in between),
        "wait_s": statistics.fmean(map(waits, between)),
    }
    if not (apart := [row for row in evaluated if "eval/engines" in row]):
        return times
    busy_s, run_s = sum(float(row["eval/seconds"]) for row in apart), max(float(row.get("time_s") or 0.0) for row in metrics)
    return {**times, "engines": float(apart[-1]["eval/engines"]), "used": busy_s / run_s if run_s else 0.0}


def time_shares(recorded: Recorded) -> Mapping[str, Mapping[str, float]]:
    """Parts of a step's time, by who spends it; what a run did not record is left out.

    Returns:
        ``learner``, seconds per step: training, handing groups over, exporting, and waiting, which is the rest. ``evaluation``: see
        `evaluation_times`; these seconds are in no other part. ``publication``, seconds per step. ``engine``, shares of the time:
        decoding, paused, idle. ``episode``, mean seconds: in the engine, in the environment, and elsewhere. ``group``, mean seconds: being
        played, and waiting in the queue for its step.
    """
    step_s = recorded.step_s
    train_s = recorded.mean("time/train_s")
    handing_s = max(0.0, recorded.mean("time/learner_s", train_s) - train_s)
    export_s, publish_s = recorded.mean("publish/export_s"), recorded.mean("publish/seconds")
    idle, paused = recorded.mean("idle/generator"), min(1.0, recorded.mean("publish/pause_s") / step_s)
    total_s, generate_s, env_s = (recorded.mean(f"episode/{name}") for name in ("total_s", "generate_s", "env_s"))
    return {
        "learner": {
            "train_s": train_s,
            "handing_over_s": handing_s,
            "export_s": export_s,
            "waiting_s": max(0.0, step_s - train_s - handing_s - export_s),
        },
        "evaluation": recorded.evaluations,
        "publication": {"seconds": publish_s, "pause_s": recorded.mean("publish/pause_s")},
        "engine": {"decoding": 1.0 - idle, "paused": min(paused, idle), "idle": max(0.0, idle - paused)},
        "episode": {"engine_s": generate_s, "env_s": env_s, "elsewhere_s": max(0.0, total_s - generate_s - env_s)},
        "group": {"played_s": recorded.mean("group/seconds_mean"), "queued_s": recorded.mean("queue/wait_s")},
    }


@dataclass(frozen=True, slots=True)
class Bound:
    """The shortest step that overlap of generation and training could reach with the sizes of the run.

    Attributes:
        generate_s: Seconds of a step in which groups are under way.
        train_s: Seconds of training, handing over included.
        publish_s: Seconds of exporting and publishing weights.
    """

    generate_s: float
    train_s: float
    publish_s: float

    @property
    def synchronous_s(self) -> float:
        """Seconds per step, one after the other."""
        return self.generate_s + self.train_s + self.publish_s

    @property
    def ideal_s(self) -> float:
        """Seconds per step with generation and training side by side, at best."""
        return max(self.generate_s, self.train_s)


def bound_of(recorded: Recorded) -> Bound:
    """Return the bound of a run.

    Groups of a synchronous run are under way while the learner waits. Those of an asynchronous one are always; there the time in which
    engines decode counts, which is at most that.
    """
    shares = time_shares(recorded)
    learner, publish_s = shares["learner"], shares["publication"]["seconds"] + shares["learner"]["export_s"]
    waiting_s = max(0.0, learner["waiting_s"] - shares["publication"]["seconds"])
    decoding_s = shares["engine"]["decoding"] * recorded.step_s
    generate_s = decoding_s if recorded.settings.max_staleness else waiting_s
    return Bound(generate_s=generate_s, train_s=learner["train_s"] + learner["handing_over_s"], publish_s=publish_s)
