"""The settings of ``agentrl sample``: those of an evaluation, and which episodes become a data set."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from agentrl.config.evaluate import EvaluateConfig, FiguresConfig, MeasureConfig, PlayedConfig
from agentrl.config.schema import EvalConfig, RolloutConfig
from agentrl.config.sections import Count, CountOrZero, NonNegative, Record, Temperature


@dataclass(frozen=True, kw_only=True)
class SampleRunConfig(MeasureConfig):
    """The model and the environment to sample from, the episodes that are kept, and the place of the data set."""

    select: Literal["best", "pairs", "all"] = "best"
    """Rows of the data set: the ``best`` episodes of each task (rejection sampling), ``pairs`` of its best and its worst, or ``all``."""
    keep: Count = 1
    """With ``--select best``: episodes of a task to keep, those with the highest rewards. With ``pairs``: pairs of a task at most, the best
    episode with the worst, the second best with the second worst, and so on."""
    min_reward: float | None = None
    """With ``--select best`` or ``all``: reward that an episode needs at least. Unset: any."""
    min_margin: NonNegative = 0.0
    """With ``--select pairs``: the rewards of a pair differ by more than this."""
    num_tasks: CountOrZero = 0
    """Tasks to sample, the first in the order of the seed; 0: all of them."""
    output: Path | None = None
    """Directory for the data set. Default: ``runs/sample-<environment>-<date>-<time>``."""
    resume: bool = False
    """Go on in ``--output`` where an earlier command was ended; every task is in the data set once."""
    baseline: tyro.conf.Suppress[str] = ""
    record: tyro.conf.Suppress[Record] = "all"


@dataclass(frozen=True, kw_only=True)
class SampledConfig(PlayedConfig):
    """Budgets, sampling and deadlines of episodes."""

    n_samples_per_prompt: Count = RolloutConfig.n_samples_per_prompt
    """Answers per prompt, or episodes per task."""
    temperature: Temperature = RolloutConfig.temperature
    """Sampling temperature, from 0.01 to 2."""


@dataclass(frozen=True, kw_only=True)
class SampledFiguresConfig(FiguresConfig):
    """Figures without settings of their own: the number of episodes is ``--n-samples-per-prompt``."""

    eval_samples: tyro.conf.Suppress[int] = EvalConfig.eval_samples
    eval_temperature: tyro.conf.Suppress[float | None] = None
    eval_by: tyro.conf.Suppress[str] = ""
    eval_pass_score: tyro.conf.Suppress[float] = EvalConfig.eval_pass_score


@dataclass(frozen=True, kw_only=True)
class SampleConfig(EvaluateConfig):
    """Everything ``agentrl sample`` needs, one section per concern."""

    run: SampleRunConfig = field(default_factory=SampleRunConfig)
    rollout: SampledConfig = field(default_factory=SampledConfig)
    eval: SampledFiguresConfig = field(default_factory=SampledFiguresConfig)
