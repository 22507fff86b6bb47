"""Settings of evaluations, of their comparison with another model, and of the episodes that become a data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from agentrl.core.settings import Alias, Count, CountOrZero, Fraction, NonNegative, ResumeMayChange, TemperatureOrZero
from agentrl.track.plan import Record


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation of the model. Choose evaluation tasks with ``--eval-prompts``, the environment's
    ``eval_tasks()`` or ``--eval-size``.
    """

    eval_samples: Annotated[Count, ResumeMayChange, Alias("--n-samples-per-prompt")] = 4
    """Episodes per task; pass@k is estimated for k up to this."""
    eval_temperature: Annotated[TemperatureOrZero | None, ResumeMayChange, Alias("--temperature")] = None
    """Sampling temperature of evaluations, at most 2; 0 takes the most likely token each time. Unset: ``--temperature``."""
    eval_by: Annotated[str, ResumeMayChange] = ""
    """Key of the tasks' metadata by which figures are given apart. Empty: ``kind``, else ``source``, where tasks have them."""
    eval_pass_score: Annotated[Fraction, ResumeMayChange] = 1.0
    """Score from which an episode counts as solved in pass@k."""


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """The comparison with another model, and the records of an evaluation."""

    baseline: str | None = None
    """Model to compare with on the same tasks: a directory or hub name, or ``start`` for the one that the run of ``--run`` began with,
    without ``--run`` the bundled one."""
    record: Record = "all"
    """Trajectories written to ``trajectories.jsonl``: none, one per task, or every one."""


@dataclass(frozen=True, kw_only=True)
class SelectConfig:
    """Episodes that become rows of a data set."""

    select: Annotated[Literal["best", "pairs", "all"], ResumeMayChange] = "best"
    """Rows of the data set: the ``best`` episodes of each task (rejection sampling), ``pairs`` of its best and its worst, or ``all``."""
    keep: Annotated[Count, ResumeMayChange] = 1
    """With ``--select best``: episodes of a task to keep, those with the highest rewards. With ``pairs``: pairs of a task at most, the best
    episode with the worst, the second best with the second worst, and so on."""
    min_reward: Annotated[float | None, ResumeMayChange] = None
    """With ``--select best`` or ``all``: reward that an episode needs at least. Unset: any."""
    min_margin: Annotated[NonNegative, ResumeMayChange] = 0.0
    """With ``--select pairs``: the rewards of a pair differ by more than this."""
    num_tasks: CountOrZero = 0
    """Tasks to sample, the first in the order of the seed; 0: all of them."""
    resume: Annotated[bool, ResumeMayChange] = False
    """Go on in ``--output`` where an earlier command was ended; every task is in the data set once."""
