"""From the words of ``agentrl eval`` to its checked settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import tyro
from pydantic import TypeAdapter, ValidationError

from agentrl.config.algorithm import AlgoConfig
from agentrl.config.evaluate import EnginesConfig, EvaluateConfig, FiguresConfig, MeasureConfig, PlayedConfig
from agentrl.config.load import (
    TYRO,
    expand_aliases,
    field_error,
    field_homes,
    flag_value,
    from_mapping,
    read_file,
    take_config_flag,
    with_agent_flag,
)
from agentrl.config.lora import holds_adapter
from agentrl.config.reward import ANSWER, RewardConfig
from agentrl.config.rules import check_evaluation
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.env.load import original_or_copy

START = "start"
"""What ``--baseline`` calls the model that a run began with."""

SAME_HERE = {"--n-samples-per-prompt": "--eval-samples", "--temperature": "--eval-temperature", "--num-tasks": "--eval-size"}
"""Flags that say the same as another one where nothing is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A checked call of ``agentrl eval``."""

    config: EvaluateConfig
    baseline: str | None  # the model to compare with, "" being the bundled one; `None` if there is none


def load_request(args: Sequence[str]) -> Request:
    """Read the command-line words after ``eval``, and the run or the file whose settings they change.

    Raises:
        ConfigError: If a value is wrong, a file is missing, or the run has no model.
        SystemExit: With code 2 for a malformed flag, 0 for ``--help`` (raised by the flag parser).
    """
    path, rest = take_config_flag(_same_here(expand_aliases(args)))
    rest = with_agent_flag(rest)
    base, default = base_settings(flag_value(rest, "--run"), path)
    settings = tyro.cli(EvaluateConfig, prog="agentrl eval", args=rest, default=default, config=TYRO, description=_DESCRIPTION)
    return make_request(settings, base)


def base_settings(run: str | None, path: Path | None) -> tuple[TrainConfig, EvaluateConfig]:
    """Return the settings of training that an evaluation begins with, from a run or a file, and its own defaults that follow from them.

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
    """Return the checked request; `base` holds the settings of training that `settings` began with.

    Raises:
        ConfigError: If a value is wrong, or the run has no model.
    """
    return Request(config=check_evaluation(_with_valid_fields(settings)), baseline=_baseline(settings, base))


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
    penalties = ("overlong_buffer", "overlong_penalty", "stop_properly_penalty")
    agent = original_or_copy(base.run.agent, run_dir) if run_dir is not None else base.run.agent
    return EvaluateConfig(
        run=MeasureConfig(agent=agent, seed=base.run.seed, ray_address=base.run.ray_address),
        model=replace(base.model, model=_model_of(run_dir)) if run_dir is not None else base.model,
        data=replace(base.data, remote_rm_url=""),  # by now it is the agent
        rollout=PlayedConfig(**asdict(base.rollout)),
        reward=base.reward if base.run.agent == ANSWER else RewardConfig(),  # else the environment says what an episode is worth
        isolation=base.isolation,
        engine=EnginesConfig(**asdict(replace(base.engine, colocate=False))),
        eval=FiguresConfig(**asdict(replace(base.eval, eval_every=0, eval_at_start=False, keep_best=""))),
        algo=AlgoConfig(advantage_estimator="reinforce", off_policy="none", **{name: getattr(base.algo, name) for name in penalties}),
    )


def _model_of(run_dir: Path) -> str:
    """The best model of a run if one was kept, else its last; "" if it has none, which is told when no other is named.

    Of a run with an adapter it is the model that ``agentrl export RUN --merge`` wrote.
    """
    if holds_adapter(run_dir / "model") and not (run_dir / "merged" / "config.json").is_file():
        remedy = f"Write the whole model first: agentrl export {run_dir} --merge."
        raise ConfigError("--run", str(run_dir), "holds an adapter without its model", remedy)
    found = [path for path in (run_dir / "best", run_dir / "model", run_dir / "merged") if (path / "config.json").is_file()]
    return str(found[0]) if found else ""


def _with_valid_fields(settings: EvaluateConfig) -> EvaluateConfig:
    try:
        settings = _adapter().validate_python(asdict(settings))
    except ValidationError as error:
        raise field_error(error, "eval") from None
    output = settings.run.output
    if output is not None and (output / "eval.json").exists():
        raise ConfigError("--output", str(output), "already holds results", "Choose another directory.")
    if settings.run.run is not None and not settings.model.model:
        raise ConfigError("--run", str(settings.run.run), "has no model in it", "Let the run finish, or name one with --model.")
    return settings


@cache
def _adapter() -> TypeAdapter[EvaluateConfig]:
    return TypeAdapter(EvaluateConfig)


def as_training(config: EvaluateConfig) -> TrainConfig:
    """Return the settings in the form of a run's, in which ``agentrl inspect`` and ``agentrl replay`` read them."""
    given = {name: value for section in asdict(config).values() for name, value in section.items()}
    return from_mapping({name: value for name, value in given.items() if name in field_homes() and name != "resume"})


def _baseline(settings: EvaluateConfig, base: TrainConfig) -> str | None:
    given = settings.run.baseline
    if given != START:
        return given or None
    return base.model.model if settings.run.run is not None else ""
