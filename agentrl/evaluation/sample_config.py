"""From the words of ``agentrl sample`` to its checked settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import tyro
from pydantic import TypeAdapter, ValidationError

from agentrl.config.evaluate import EvaluateConfig
from agentrl.config.load import TYRO, expand_aliases, field_error, flag_value, take_config_flag, with_agent_flag
from agentrl.config.rules import check_evaluation
from agentrl.config.sample import SampleConfig, SampledConfig, SampledFiguresConfig, SampleRunConfig
from agentrl.core.errors import ConfigError
from agentrl.evaluation.config import base_settings

DESCRIPTION = (
    "Sample answers to prompts or episodes of tasks with the engines of training, score them, and write a data set for agentrl sft, dpo "
    "and their kin. --config FILE takes the settings of a training run from a file; --dry-run prints the settings and stops."
)
FREE_TO_CHANGE = frozenset(
    {"resume", "debug", "runtime", "ray_address", "stall_timeout_s", "output", "select", "keep", "min_reward", "min_margin"}
)
"""Settings that may differ where ``--resume`` goes on."""


def load_sample(args: Sequence[str]) -> SampleConfig:
    """Read the command-line words after ``sample``, and the run or the file whose settings they change.

    Raises:
        ConfigError: If a value is wrong, a file is missing, or the run has no model.
        SystemExit: With code 2 for a malformed flag, 0 for ``--help`` (raised by the flag parser).
    """
    path, rest = take_config_flag(expand_aliases(args))
    rest = with_agent_flag(rest)
    default = sample_default(flag_value(rest, "--run"), path)
    return make_sample(tyro.cli(SampleConfig, prog="agentrl sample", args=rest, default=default, config=TYRO, description=DESCRIPTION))


def sample_default(run: str | None, path: Path | None) -> SampleConfig:
    """Return the settings to begin with: the defaults, or those of a run or of a file.

    Raises:
        ConfigError: If both are given, or one cannot be read.
    """
    base, evaluated = base_settings(run, path)
    sections: dict[str, Any] = {item.name: getattr(evaluated, item.name) for item in fields(EvaluateConfig)}
    return SampleConfig(
        **{
            **sections,
            "run": SampleRunConfig(agent=evaluated.run.agent, seed=evaluated.run.seed, ray_address=evaluated.run.ray_address),
            "rollout": SampledConfig(**asdict(evaluated.rollout)),
            "eval": SampledFiguresConfig(),
            "reward": base.reward,
        }
    )


def make_sample(settings: SampleConfig) -> SampleConfig:
    """Return the checked settings.

    Raises:
        ConfigError: For the first setting that is wrong or has no effect.
    """
    try:
        settings = _adapter().validate_python(asdict(settings))
    except ValidationError as error:
        raise field_error(error, "sample") from None
    run = settings.run
    if run.run is not None and not settings.model.model:
        raise ConfigError("--run", str(run.run), "has no model in it", "Let the run finish, or name one with --model.")
    for name, value, default, wanted in (
        ("--keep", run.keep, 1, ("best", "pairs")),
        ("--min-reward", run.min_reward, None, ("best", "all")),
        ("--min-margin", run.min_margin, 0.0, ("pairs",)),
    ):
        if value != default and run.select not in wanted:
            raise ConfigError(name, value, f"has no effect with --select {run.select}", f"Leave it out, or use --select {wanted[0]}.")
    samples = settings.rollout.n_samples_per_prompt
    if run.select == "pairs" and samples < 2:
        raise ConfigError("--n-samples-per-prompt", samples, "gives no pairs", "Use at least 2.")
    if run.resume and run.output is None:
        raise ConfigError("--resume", True, "needs to know which data set", "Give --output, the same each time.")
    settings = replace(settings, eval=replace(settings.eval, eval_samples=samples))
    checked = check_evaluation(settings)
    assert isinstance(checked, SampleConfig)
    return checked


def fixed_settings(config: SampleConfig) -> dict[str, Any]:
    """Return the settings that decide the data set, by section, in JSON's own types."""
    return {
        section: {name: _plain(value) for name, value in values.items() if name not in FREE_TO_CHANGE}
        for section, values in asdict(config).items()
    }


def changed_settings(saved: Mapping[str, Any], config: SampleConfig) -> list[str]:
    """Return the names of the settings whose values are not those of the data set that is begun; one newer than it has its default."""
    now, defaults = fixed_settings(config), fixed_settings(SampleConfig())
    return [
        f"{section}.{name} (was {was!r}, now {value!r})"
        for section, values in now.items()
        for name, value in values.items()
        if (was := saved.get(section, {}).get(name, defaults[section][name])) != value
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(map(_plain, value)) if isinstance(value, tuple) else value


@cache
def _adapter() -> TypeAdapter[SampleConfig]:
    return TypeAdapter(SampleConfig)
