"""The settings of ``agentrl eval``: those of training that bear on episodes, and which models are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

import tyro
from pydantic import TypeAdapter, ValidationError

from agentrl.config.load import TYRO, expand_aliases, field_error, flag_value, from_mapping, read_file, take_config_flag, validate
from agentrl.config.ranges import CountOrZero, Positive
from agentrl.config.rules import check
from agentrl.config.schema import (
    AlgoConfig,
    DataConfig,
    EngineConfig,
    EvalConfig,
    IsolationConfig,
    LearnerConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from agentrl.core.errors import ConfigError

START = "start"
"""What ``--baseline`` calls the model that a run began with."""

SAME_HERE = {"--n-samples-per-prompt": "--eval-samples", "--temperature": "--eval-temperature", "--num-tasks": "--eval-size"}
"""Flags that say the same as another one where nothing is trained."""


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """What is measured, and where results go."""

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
    record: Literal["none", "sample", "all"] = "all"
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
    """How episodes are run."""

    groups_per_step: tyro.conf.Suppress[int] = RolloutConfig.groups_per_step
    n_samples_per_prompt: tyro.conf.Suppress[int] = RolloutConfig.n_samples_per_prompt
    temperature: tyro.conf.Suppress[float] = RolloutConfig.temperature


@dataclass(frozen=True, kw_only=True)
class EnginesConfig(EngineConfig):
    """vLLM."""

    colocate: tyro.conf.Suppress[bool] = EngineConfig.colocate


@dataclass(frozen=True, kw_only=True)
class FiguresConfig(EvalConfig):
    """Which figures."""

    eval_every: tyro.conf.Suppress[int] = EvalConfig.eval_every
    eval_at_start: tyro.conf.Suppress[bool] = EvalConfig.eval_at_start
    keep_best: tyro.conf.Suppress[str] = EvalConfig.keep_best


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Everything ``agentrl eval`` needs, one section per concern."""

    measure: MeasureConfig = field(default_factory=MeasureConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: PlayedConfig = field(default_factory=PlayedConfig)
    isolation: IsolationConfig = field(default_factory=IsolationConfig)
    engine: EnginesConfig = field(default_factory=EnginesConfig)
    eval: FiguresConfig = field(default_factory=FiguresConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A checked call of ``agentrl eval``.

    Attributes:
        settings: As given.
        config: The same for who knows training only: one model, no learner.
        baseline: The model to compare with, "" being the bundled one; `None` if there is none.
    """

    settings: EvaluateConfig
    config: TrainConfig
    baseline: str | None

    def with_model(self, model: str) -> TrainConfig:
        """The configuration for another model."""
        return replace(self.config, model=replace(self.config.model, model=model))


def load_request(args: Sequence[str]) -> Request:
    """Read flags, and the run or the file whose settings they change.

    Args:
        args: Command-line words after ``eval``.

    Raises:
        ConfigError: If a value is wrong, a file is missing, or the run has no model.
        SystemExit: With code 2 for a malformed flag, 0 for ``--help`` (raised by the flag parser).
    """
    path, rest = take_config_flag(_same_here(expand_aliases(args)))
    base, default = base_settings(flag_value(rest, "--run"), path)
    settings = tyro.cli(EvaluateConfig, prog="agentrl eval", args=rest, default=default, config=TYRO, description=_DESCRIPTION)
    return make_request(settings, base)


def base_settings(run: str | None, path: Path | None) -> tuple[TrainConfig, EvaluateConfig]:
    """Return the settings of training that an evaluation begins with, and its own defaults that follow from them.

    Args:
        run: Directory of the run to evaluate, if there is one.
        path: File with settings, if there is one.

    Raises:
        ConfigError: If both are given, or one cannot be read.
    """
    run_dir = _run_dir(run)
    if run_dir is not None and path is not None:
        raise ConfigError("--config", str(path), "--run brings its own settings", "Leave out one of the two.")
    path = run_dir / "config.json" if run_dir is not None else path
    base = from_mapping(read_file(path), source=str(path)) if path is not None else TrainConfig()
    return base, _defaults(base, run_dir)


def make_request(settings: EvaluateConfig, base: TrainConfig) -> Request:
    """Return the checked request.

    Args:
        settings: As given.
        base: The settings of training that they began with.

    Raises:
        ConfigError: If a value is wrong, or the run has no model.
    """
    _check_fields(settings)
    config = _as_training(settings, base.algo)
    return Request(settings=settings, config=config, baseline=_baseline(settings, base))


_DESCRIPTION = (
    "Measure a model in an environment: mean reward and score, pass@k, by kind of task, with bootstrap intervals; alone, or against "
    "another model on the same tasks. --config FILE takes the settings of a training run from a file."
)


def _same_here(words: Sequence[str]) -> list[str]:
    parts = [word.partition("=") for word in words]
    return [SAME_HERE.get(name, name) + equals + value for name, equals, value in parts]


def _run_dir(given: str | None) -> Path | None:
    if given is None:
        return None
    path = Path(given).expanduser()
    if not (path / "config.json").is_file():
        raise ConfigError("--run", given, "holds no run", "Name a run's directory, as printed at its end.")
    return path


def _defaults(base: TrainConfig, run_dir: Path | None) -> EvaluateConfig:
    measure = MeasureConfig(agent=base.run.agent, seed=base.run.seed, ray_address=base.run.ray_address)
    return EvaluateConfig(
        measure=measure,
        model=replace(base.model, model=_model_of(run_dir)) if run_dir is not None else base.model,
        data=replace(base.data, remote_rm_url=""),  # by now it is the agent
        rollout=PlayedConfig(**asdict(base.rollout)),
        isolation=base.isolation,
        engine=EnginesConfig(**asdict(replace(base.engine, colocate=False))),
        eval=FiguresConfig(**asdict(replace(base.eval, eval_every=0, eval_at_start=False, keep_best=""))),
    )


def _model_of(run_dir: Path) -> str:
    """The best model of a run if one was kept, else its last; "" if it has none, which is told when no other is named."""
    found = [path for path in (run_dir / "best", run_dir / "model") if (path / "config.json").is_file()]
    return str(found[0]) if found else ""


def _check_fields(settings: EvaluateConfig) -> None:
    try:
        _adapter().validate_python(asdict(settings))
    except ValidationError as error:
        raise field_error(error, "eval") from None
    output = settings.measure.output
    if output is not None and (output / "eval.json").exists():
        raise ConfigError("--output", str(output), "already holds results", "Choose another directory.")
    if settings.measure.run is not None and not settings.model.model:
        raise ConfigError("--run", str(settings.measure.run), "has no model in it", "Let the run finish, or name one with --model.")


@cache
def _adapter() -> TypeAdapter[EvaluateConfig]:
    return TypeAdapter(EvaluateConfig)


def _as_training(settings: EvaluateConfig, algo: AlgoConfig) -> TrainConfig:
    """A training configuration with the same episodes, checked by the rules of training; its length penalties are those of `algo`."""
    measure = settings.measure
    runtime: Literal["ray", "local"] = "local" if measure.runtime == "auto" else measure.runtime
    if measure.runtime == "auto" and (settings.engine.num_engines > 1 or measure.ray_address):
        runtime = "ray"
    config = TrainConfig(
        run=RunConfig(
            agent=measure.agent,
            seed=measure.seed,
            runtime=runtime,
            ray_address=measure.ray_address,
            stall_timeout_s=measure.stall_timeout_s,
            debug=measure.debug,
        ),
        data=settings.data,
        model=settings.model,
        rollout=RolloutConfig(**asdict(settings.rollout)),
        isolation=settings.isolation,
        engine=EngineConfig(**asdict(settings.engine)),
        algo=AlgoConfig(
            advantage_estimator="reinforce",
            off_policy="none",
            overlong_buffer=algo.overlong_buffer,
            overlong_penalty=algo.overlong_penalty,
            stop_properly_penalty=algo.stop_properly_penalty,
        ),
        eval=replace(EvalConfig(**asdict(settings.eval)), eval_every=1),
    )
    return replace(check(validate(config)), learner=_no_learner())


def _no_learner() -> LearnerConfig:
    return replace(LearnerConfig(), num_learners=0)


def _baseline(settings: EvaluateConfig, base: TrainConfig) -> str | None:
    given = settings.measure.baseline
    if given != START:
        return given or None
    return base.model.model if settings.measure.run is not None else ""
