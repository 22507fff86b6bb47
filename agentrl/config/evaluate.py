"""The settings of ``agentrl eval``: the sections of training that bear on episodes, and which models are measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import tyro

from agentrl.config.algorithm import AlgoConfig
from agentrl.config.reward import RewardConfig
from agentrl.config.schema import (
    DataConfig,
    EndpointConfig,
    EngineConfig,
    EvalConfig,
    IsolationConfig,
    ModelConfig,
    RolloutConfig,
    TrainConfig,
)
from agentrl.config.sections import CountOrZero, Positive, Record


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """The models and the environment to measure, and the place of the results."""

    run: Path | None = None
    """Directory of a run: its environment, its settings, and its best model if one was kept, else its last."""
    agent: str = ""
    """Environment or reward to measure in, as for ``agentrl train``. Required, unless ``--run`` is given."""
    baseline: str = ""
    """Model to compare with on the same tasks: a directory or hub name, or ``start`` for the one that the run of ``--run`` began with,
    without ``--run`` the bundled one."""
    output: Path | None = None
    """Directory for the results. Default: ``runs/eval-<environment>-<date>-<time>``."""
    seed: CountOrZero = 0
    """Seed of the choice of tasks, of sampling and of the intervals."""
    record: Record = "all"
    """Trajectories written to ``trajectories.jsonl``: none, one per task, or every one."""
    runtime: Literal["auto", "local", "ray"] = "auto"
    """``local`` runs the engine in this process, ``ray`` runs engines as Ray actors; ``auto`` is local for one engine."""
    ray_address: str = ""
    """Ray cluster to join (``auto`` or ``host:port``). Empty starts a private cluster on loopback."""
    stall_timeout_s: Positive = 600.0
    """Stop with a diagnosis if no task is done for this many seconds."""
    debug: bool = False
    """Show tracebacks and the output of worker processes."""


@dataclass(frozen=True, kw_only=True)
class PlayedConfig(RolloutConfig):
    """Budgets, sampling and deadlines of episodes."""

    groups_per_step: tyro.conf.Suppress[int] = RolloutConfig.groups_per_step
    n_samples_per_prompt: tyro.conf.Suppress[int] = RolloutConfig.n_samples_per_prompt
    temperature: tyro.conf.Suppress[float] = RolloutConfig.temperature


@dataclass(frozen=True, kw_only=True)
class EnginesConfig(EngineConfig):
    """The engines that sample: vLLM, or models of transformers."""

    colocate: tyro.conf.Suppress[bool] = EngineConfig.colocate
    sleep_level: tyro.conf.Suppress[Literal[0, 1, 2]] = EngineConfig.sleep_level
    learner_memory_gib: tyro.conf.Suppress[float] = EngineConfig.learner_memory_gib
    weight_transport: tyro.conf.Suppress[Literal["auto", "nccl", "ipc", "shm", "disk"]] = EngineConfig.weight_transport
    publish_timeout_s: tyro.conf.Suppress[float] = EngineConfig.publish_timeout_s
    weight_bucket_mib: tyro.conf.Suppress[int] = EngineConfig.weight_bucket_mib


@dataclass(frozen=True, kw_only=True)
class FiguresConfig(EvalConfig):
    """Episodes per task, and the figures that are made of them."""

    eval_every: tyro.conf.Suppress[int] = EvalConfig.eval_every
    eval_at_start: tyro.conf.Suppress[bool] = EvalConfig.eval_at_start
    keep_best: tyro.conf.Suppress[str] = EvalConfig.keep_best


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Everything ``agentrl eval`` needs, one section per concern."""

    run: MeasureConfig = field(default_factory=MeasureConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: PlayedConfig = field(default_factory=PlayedConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    isolation: IsolationConfig = field(default_factory=IsolationConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    engine: EnginesConfig = field(default_factory=EnginesConfig)
    eval: FiguresConfig = field(default_factory=FiguresConfig)
    algo: tyro.conf.Suppress[AlgoConfig] = field(default_factory=AlgoConfig)
    """Penalties for length, which are part of the rewards of a run."""


PlayConfig: TypeAlias = TrainConfig | EvaluateConfig
"""Settings of a command that plays episodes on engines, with or without a learner beside them."""
