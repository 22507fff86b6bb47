"""Settings of the commands that play episodes and train nothing: ``agentrl eval``, ``sample``, ``play`` and ``serve``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from agentrl.config.episodes import SamplingConfig
from agentrl.config.record import Record
from agentrl.config.schema import EvalConfig, PlaySettings
from agentrl.core.settings import Count, CountOrZero, NonNegative, ResumeMayChange


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """The run that settings and model are taken from, and the place of the results."""

    run: Path | None = None
    """Directory of a run: its environment, its settings, and its best model if one was kept, else its last."""
    output: Annotated[Path | None, ResumeMayChange] = None
    """Directory for the results. Default: ``runs/<command>-<environment>-<date>-<time>``."""


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


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(PlaySettings):
    """Sections of ``agentrl eval``."""

    source: SourceConfig = field(default_factory=SourceConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)


@dataclass(frozen=True, kw_only=True)
class SampleConfig(PlaySettings):
    """Sections of ``agentrl sample``."""

    source: SourceConfig = field(default_factory=SourceConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    select: SelectConfig = field(default_factory=SelectConfig)


@dataclass(frozen=True, kw_only=True)
class PlayOptions:
    """Progress of a play session, and what it shows."""

    tokenizer: str = ""
    """Model whose tokenizer and chat template are used when you play. Default: those of the bundled models, with pictures."""
    task: str = ""
    """Begin with this task: its id, or its number in the environment's own order, from 0."""
    episodes: CountOrZero = 0
    """Leave after so many episodes. 0: when you do; without pauses after one."""
    pause: bool = True
    """Wait for the Enter key before each turn of a model."""
    show_tokens: bool = False
    """Show the token ids that are read and written."""
    logprobs: bool = False
    """Show the log-probability of every token that the model samples."""


@dataclass(frozen=True, kw_only=True)
class PlayConfig(PlaySettings):
    """Sections of ``agentrl play``; an empty ``--model`` is a person, and ``tiny`` the model that ships with agentrl."""

    play: PlayOptions = field(default_factory=PlayOptions)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


NO_ENGINE = "none"
"""Value of ``--engine`` with which ``agentrl serve`` answers with a fixed text."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig(PlaySettings):
    """Sections of ``agentrl serve``; with ``--engine none`` every answer is one fixed text, which tries a connection within seconds."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
