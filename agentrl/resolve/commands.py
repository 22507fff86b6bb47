"""The commands that play episodes, as the loader reads them: sections, the settings to begin with, and rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from agentrl.cluster.plan import RunConfig
from agentrl.config.evaluate import EvaluateConfig, PlayConfig, SampleConfig, ServeConfig, SourceConfig
from agentrl.config.load import Command, Loaded, flag_value, load, read_flags
from agentrl.config.mapping import refuse_hidden
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed, settings_of
from agentrl.config.words import Word
from agentrl.core.adapter_files import holds_adapter
from agentrl.core.errors import ConfigError
from agentrl.core.fingerprints import ACCEPT
from agentrl.core.plugins import kept_environment
from agentrl.env.plan import ANSWER
from agentrl.evaluation.plan import MeasureConfig, SelectConfig
from agentrl.resolve.plan import checked_play, checked_steps
from agentrl.rollout.plan import RewardConfig

START = "start"
"""Value of ``--baseline`` that stands for the model which a run began with."""
TINY = "tiny"
"""Name of the model that ships with agentrl, where no name stands for a person or must be given."""
PLENTY = 1_000_000
"""Tokens and seconds that a person may use, unless a flag says how many, because nobody types as tersely and as fast as a model."""


class TrainCommand(Command[TrainConfig]):
    """``agentrl train``."""

    def finish(self, loaded: Loaded[TrainConfig]) -> TrainConfig:
        """Apply the rules of training, and decide what follows from settings and model."""
        return checked_steps(loaded).settings


class MeasuringCommand(Command[Any]):
    """A command that may take settings and model of a training run: ``agentrl eval`` and ``sample``."""

    def begin(self, saved: Mapping[str, Any], path: Path | None) -> Any:
        """Return the settings of a run or a file that bear on episodes; what concerns the course of a training is left out."""
        run_dir = path.parent if path is not None and path.name == "config.json" else None
        # An evaluation begins afresh with its own settings; a run's `resume` names a directory, that of a data set is on or off.
        known = settings_of(self.settings)
        own = {item.name for kind in (MeasureConfig, *([SelectConfig] if run_dir else [])) for item in fields(kind)}
        taken = {name: value for name, value in saved.items() if name not in own and (run_dir is None or name in known)}
        config = super().begin(taken, path)
        config = replace(config, run=RunConfig(agent=config.run.agent, seed=config.run.seed, ray_address=config.run.ray_address))
        config = replace(changed(config, remote_rm_url=""), source=SourceConfig())  # by now that is the agent
        if self.settings is EvaluateConfig:
            temperature = saved.get("eval_temperature")
            config = changed(config, eval_temperature=saved.get("temperature") if temperature is None else temperature)
            config = replace(config, measure=MeasureConfig())
            if config.run.agent != ANSWER:  # the environment says what an episode is worth
                config = replace(config, reward=RewardConfig())
        if run_dir is None:
            return config
        return changed(config, run=run_dir, model=_model_of(run_dir), agent=kept_environment(config.run.agent, run_dir))

    def finish(self, loaded: Loaded[Any]) -> Any:
        """Name the baseline, and apply the rules of playing and of the command."""
        config = loaded.settings
        run, output = config.source.run, config.source.output
        if run is not None and not config.model.model:
            raise ConfigError("--run", str(run), "has no model in it", "Let the run finish, or name one with --model.")
        if isinstance(config, SampleConfig):
            _check_selection(config)
        elif output is not None and (output / "eval.json").exists():
            raise ConfigError("--output", str(output), "already holds results", "Choose another directory.")
        elif config.measure.baseline == START:
            config = changed(config, baseline=str(loaded.saved.get("model", "")) if run is not None else "")
        return checked_play(config)


def run_settings(run: str | Path | None) -> Path | None:
    """Return the file with the settings of the run that ``--run`` names; `None` if it names none.

    Raises:
        ConfigError: If the directory holds no run.
    """
    if run is None:
        return None
    path = Path(run).expanduser()
    if not (path / "config.json").is_file():
        raise ConfigError("--run", str(run), "holds no run", "Name a run's directory, as printed at its end.")
    return path / "config.json"


def _model_of(run_dir: Path) -> str:
    """The best model of a run if one was kept, else its last; "" if it has none, which is told when no other is named.

    Of a run with an adapter it is the model that ``agentrl export RUN --merge`` wrote.
    """
    if holds_adapter(run_dir / "model") and not (run_dir / "merged" / "config.json").is_file():
        remedy = f"Write the whole model first: agentrl export {run_dir} --merge."
        raise ConfigError("--run", str(run_dir), "holds an adapter without its model", remedy)
    models = [path for path in (run_dir / "best", run_dir / "model", run_dir / "merged") if (path / "config.json").is_file()]
    return str(models[0]) if models else ""


def _check_selection(config: SampleConfig) -> None:
    select, samples = config.select, config.sampling.n_samples_per_prompt
    for name, value, default, wanted in (
        ("--keep", select.keep, 1, ("best", "pairs")),
        ("--min-reward", select.min_reward, None, ("best", "all")),
        ("--min-margin", select.min_margin, 0.0, ("pairs",)),
    ):
        if value != default and select.select not in wanted:
            raise ConfigError(name, value, f"has no effect with --select {select.select}", f"Leave it out, or use --select {wanted[0]}.")
    if select.select == "pairs" and samples < 2:
        raise ConfigError("--n-samples-per-prompt", samples, "gives no pairs", "Use at least 2.")
    if select.resume and config.source.output is None:
        raise ConfigError("--resume", True, "needs to know which data set", "Give --output, the same each time.")


class PlayCommand(Command[PlayConfig]):
    """``agentrl play``."""

    def finish(self, loaded: Loaded[PlayConfig]) -> PlayConfig:
        """Apply the rules of playing, and lift the limits that were not given where a person plays."""
        config = loaded.settings
        if watched := config.model.model:
            return changed(checked_play(changed(config, model="" if watched == TINY else watched)), model=watched)
        if config.play.logprobs:
            raise ConfigError("--logprobs", True, "a person has none", "Watch a model with --model DIR, or --model tiny.")
        limits = {"max_new_tokens": PLENTY, "max_model_len": PLENTY, "episode_timeout_s": float(PLENTY)}
        checked = checked_play(changed(config, model=config.play.tokenizer))
        return changed(checked, model="", **{name: value for name, value in limits.items() if name not in loaded.sources})


class ServeCommand(Command[ServeConfig]):
    """``agentrl serve``."""

    def finish(self, loaded: Loaded[ServeConfig]) -> ServeConfig:
        """Apply the rules of playing."""
        config = loaded.settings
        if not config.model.model:
            raise ConfigError("--model", "", "is required", "Name a directory or a hub name, or tiny, the model that ships with agentrl.")
        name = "" if config.model.model == TINY else config.model.model
        return checked_play(changed(config, agent="the program that asks", model=name))


DRY_RUN = ("--config", "--dry-run")
TRAIN = TrainCommand(
    "train",
    TrainConfig,
    "Train an agent in an environment. Settings: defaults, then --config, then flags.",
    main=(
        *("agent", "prompts", "model", "num_steps", "asynchronous", "advantage_estimator", "learning_rate", "groups_per_step"),
        *("n_samples_per_prompt", "max_new_tokens", "max_turns", "flat_groups", "eval_every", "save_every", "resume", "run_dir"),
    ),
    also=(*DRY_RUN, ACCEPT),
    ignored=(EvaluateConfig, SampleConfig),
)
EVAL = MeasuringCommand(
    "eval",
    EvaluateConfig,
    "Measure a model in an environment: mean reward and score, pass@k, by kind of task, with bootstrap intervals; alone, or against "
    "another model on the same tasks. --config FILE takes the settings of a training run from a file.",
    main=("agent", "run", "model", "baseline", "eval_samples", "eval_temperature", "eval_size", "eval_by", "max_new_tokens", "output"),
    also=DRY_RUN,
    ignored=(TrainConfig, SampleConfig),
)
SAMPLE = MeasuringCommand(
    "sample",
    SampleConfig,
    "Sample answers to prompts or episodes of tasks with the engines of training, score them, and write a data set for agentrl sft, dpo "
    "and their kin. --config FILE takes the settings of a training run from a file.",
    main=(
        *("agent", "prompts", "run", "model", "n_samples_per_prompt", "temperature", "select", "keep", "min_reward", "num_tasks"),
        *("max_new_tokens", "reward_model", "output", "resume"),
    ),
    also=DRY_RUN,
    ignored=(TrainConfig, EvaluateConfig),
)
PLAY = PlayCommand(
    "play",
    PlayConfig,
    "Be the policy of an environment in the terminal, or watch a model with --model DIR or --model tiny; the episode runs as in training.",
    main=(
        *("agent", "prompts", "model", "tokenizer", "task", "seed", "episodes", "pause", "show_tokens", "logprobs", "max_turns"),
        "max_new_tokens",
    ),
)
SERVE = ServeCommand(
    "serve",
    ServeConfig,
    "Offer a model over HTTP as black-box agents meet it in training; nothing is trained. With --engine none every answer is one fixed "
    "text, which tries a connection within seconds. Ctrl-C ends it.",
    main=("model", "endpoint_port", "engine", "seed", "tool_parser", "reasoning_parser", "temperature", "max_new_tokens", "max_model_len"),
    words=(Word(setting="model", label="MODEL", doc="The model, the same as --model MODEL; tiny is the bundled one."),),
)


def read_train(args: Sequence[str]) -> Loaded[TrainConfig]:
    """Read the command-line words after ``train``, for `agentrl.resolve.plan.RunPlan.of`.

    Raises:
        ConfigError: If a flag is unknown or a value is out of range.
    """
    loaded = read_flags(TRAIN, args)
    refuse_hidden(loaded.settings)
    return loaded


def load_config(args: Sequence[str]) -> TrainConfig:
    """Read the command-line words after ``train``; see `agentrl.config.load.load`."""
    return load(TRAIN, args)


def load_eval(args: Sequence[str]) -> EvaluateConfig:
    """Read the command-line words after ``eval``, and the run or the file whose settings they change."""
    config: EvaluateConfig = load(EVAL, args, run_settings(flag_value(args, "--run")))
    return config


def load_sample(args: Sequence[str]) -> SampleConfig:
    """Read the command-line words after ``sample``, and the run or the file whose settings they change."""
    config: SampleConfig = load(SAMPLE, args, run_settings(flag_value(args, "--run")))
    return config
