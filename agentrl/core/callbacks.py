"""Callbacks: the events of a run, and the class whose methods are told of them.

Metric sinks, the recording of trajectories, the display and the summary are callbacks as well.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from agentrl.core.summaries import GroupSummary
from agentrl.core.types import Status, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBegin:
    """A run begins, or goes on from a checkpoint; neither engines nor the learner are started yet.

    Attributes:
        config: The resolved settings by section, as in ``config.json``.
        run_dir: Directory of the run.
        resumed: True if the run goes on after steps of an earlier part.
        step: Steps done so far.
    """

    config: Mapping[str, Mapping[str, Any]]
    run_dir: Path
    resumed: bool
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """A step ended, and every engine has its weights.

    Attributes:
        step: Steps done, which is the version of the weights.
        metrics: Metrics of the step, with what callbacks before this one added.
        groups: Numbers of the groups that it trained on, oldest first.
        oversampled: Numbers of the groups that were started for it and given up.
        times: When its parts began or ended, in seconds on a clock that says ``now_s``: ``begin_s``, ``taken_s``, ``trained_s``,
            ``exporting_s``, ``exported_s``, ``publishing_s`` and ``live_s``.
    """

    step: int
    metrics: Mapping[str, float]
    groups: tuple[int, ...] = ()
    oversampled: tuple[int, ...] = ()
    times: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRow:
    """The metrics of a step are complete, as they are written to ``metrics.jsonl``.

    Attributes:
        step: Steps done; 0 for an evaluation before the first step.
        metrics: Metrics of the step, with those that callbacks added.
    """

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJudged:
    """An attempt at a group ended, and it was decided what becomes of the group.

    Attributes:
        group_id: Number of the group in the run.
        attempt: Number of the attempt, from 0.
        task: The task that was played.
        verdict: ``kept``: will be trained on; ``filtered``: by ``--flat-groups`` or ``--group-filter``; ``retried`` or ``dropped``: too
            much of it failed.
        reason: Why the group was not kept; empty if it was.
        summary: Everything about the group but its tokens.
        version: Version of the weights that were live when the group was admitted.
    """

    group_id: int
    attempt: int
    task: Task
    verdict: Literal["kept", "filtered", "retried", "dropped"]
    reason: str
    summary: GroupSummary
    version: int = 0

    @property
    def kept(self) -> bool:
        """True if the group will be trained on."""
        return self.verdict == "kept"

    @property
    def task_id(self) -> str:
        """Id of the task."""
        return self.task.id

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """Reward of every trajectory; `None` where it failed."""
        return tuple(member.reward for member in self.summary.members)

    @property
    def scores(self) -> tuple[float | None, ...]:
        """Score of every trajectory, 0 to 1; `None` where there is none."""
        return tuple(member.score for member in self.summary.members)

    @property
    def statuses(self) -> tuple[Status, ...]:
        """Status of every trajectory."""
        return tuple(member.status for member in self.summary.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEnd:
    """An evaluation ended.

    Attributes:
        step: Steps done, which is the version of the weights that were evaluated.
        metrics: Figures by their names in ``metrics.jsonl``, ``eval/...``.
        seconds: Time that the evaluation took.
        text: The result in one line.
    """

    step: int
    metrics: Mapping[str, float]
    seconds: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BestModelSaved:
    """The model was saved as the best so far by ``--keep-best``; the `EvaluationEnd` of its evaluation follows.

    Attributes:
        step: Steps done, which is the version of the weights.
        metric: Name of the figure.
        value: Value of the figure.
        path: Directory of the model.
    """

    step: int
    metric: str
    value: float
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWritten:
    """A checkpoint is complete, on disk.

    Attributes:
        step: Steps done.
        path: Directory of the checkpoint.
    """

    step: int
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The run ended; all of its files are written, ``summary.json`` included.

    Attributes:
        status: ``finished``; ``interrupted`` by a signal or a callback; ``failed``; or ``restarting`` from the last checkpoint, because a
            learner rank died.
        summary: What ``summary.json`` holds.
    """

    status: str
    summary: Mapping[str, Any]


Event: TypeAlias = RunBegin | StepEnd | MetricsRow | GroupJudged | EvaluationEnd | BestModelSaved | CheckpointWritten | RunEnd

METHODS: Mapping[type[Event], str] = {
    RunBegin: "on_run_begin",
    StepEnd: "on_step_end",
    MetricsRow: "on_metrics",
    GroupJudged: "on_group_judged",
    EvaluationEnd: "on_evaluation_end",
    BestModelSaved: "on_best_model",
    CheckpointWritten: "on_checkpoint",
    RunEnd: "on_run_end",
}
"""The method of `Callback` that is told of each event."""

Done: TypeAlias = Awaitable[None] | None
Added: TypeAlias = Awaitable[Mapping[str, float] | None] | Mapping[str, float] | None


class Callback:
    """User code that follows a run: inherit, and define the methods that you need, with ``def`` or ``async def``.

    A run makes one object of the class, without arguments, and tells it of one event at a time, in order. The run waits for every
    method. Methods written with ``def`` run in a thread of their own, together with ``__init__``; those written with ``async def``
    run in the event loop of the run, which they must not block. An exception ends the run.
    """

    stop_reason: str | None = None

    def on_run_begin(self, event: RunBegin) -> Done:
        """Follow the beginning of the run, or of its continuation."""

    def on_step_end(self, event: StepEnd) -> Added:
        """Follow the end of a step.

        Returns:
            Metrics to add to those of the step, finite numbers by new names; or nothing.
        """

    def on_metrics(self, event: MetricsRow) -> Done:
        """Take the complete metrics of a step, as a metric sink does."""

    def on_group_judged(self, event: GroupJudged) -> Done:
        """Follow an attempt at a group, kept or not."""

    def on_evaluation_end(self, event: EvaluationEnd) -> Done:
        """Follow an evaluation."""

    def on_best_model(self, event: BestModelSaved) -> Done:
        """Follow the saving of the best model."""

    def on_checkpoint(self, event: CheckpointWritten) -> Done:
        """Follow the writing of a checkpoint."""

    def on_run_end(self, event: RunEnd) -> Done:
        """Follow the end of the run, also if it failed."""

    def stop(self, reason: str) -> None:
        """End the run as a first Ctrl-C does: the step under way is finished and saved, and the run can be resumed.

        Args:
            reason: Shown at the end of the run and written to ``summary.json``.
        """
        self.stop_reason = reason
