"""Settings of the commands that play episodes and train nothing: ``agentrl eval``, ``sample``, ``play`` and ``serve``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from agentrl.config.schema import PlaySettings
from agentrl.core.settings import CountOrZero, ResumeMayChange
from agentrl.evaluation.plan import EvalConfig, MeasureConfig, SelectConfig
from agentrl.rollout.plan import SamplingConfig


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """The run that settings and model are taken from, and the place of the results."""

    run: Path | None = None
    """Directory of a run: its environment, its settings, and its best model if one was kept, else its last."""
    output: Annotated[Path | None, ResumeMayChange] = None
    """Directory for the results. Default: ``runs/<command>-<environment>-<date>-<time>``."""
    accept_changed_inputs: Annotated[bool, ResumeMayChange] = False
    """Go on although tasks or models of ``--run`` are not what that run began with."""


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
