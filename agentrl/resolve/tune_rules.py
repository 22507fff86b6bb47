"""Rules between the settings of a method, and the learning rate that follows from them; nothing heavy is imported."""

from __future__ import annotations

import importlib.util
import string
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal

from agentrl.algo.facts import facts_of
from agentrl.algo.objectives import OBJECTIVES, check_objective
from agentrl.algo.options import option_names
from agentrl.algo.plan import AlgoConfig
from agentrl.assets import model_path
from agentrl.config.data_rules import check_chat_template, check_files, check_probabilities, check_template
from agentrl.config.learner_rules import check_adapter, check_computation, needing_gpus
from agentrl.config.methods import Method
from agentrl.config.model_defaults import ADAPTER_FACTOR, LARGE, MEDIUM
from agentrl.config.sections import changed
from agentrl.config.tune import DpoMethodConfig, SftDataConfig, TuneConfig
from agentrl.core.adapter_files import holds_adapter
from agentrl.core.errors import ConfigError
from agentrl.core.model_shape import read_shape
from agentrl.core.plugins import is_plugin
from agentrl.core.settings import flag, listed
from agentrl.core.tokenizers import check_teacher
from agentrl.learner.backends import facts_of_backend
from agentrl.learner.plan import ComputeConfig, LearnerConfig
from agentrl.resolve.ranks import is_rank, world_size
from agentrl.rollout.tasks import check_model

MICRO_TOKENS = 8192
"""Tokens that go through the model at once where nothing is said."""

MICRO_TOKENS_OF_CPU = 1024
"""The same on a CPU for a model from `MEDIUM` parameters: more are no faster there, and each takes 1.5 MB of a model of 1.35e8."""

SMOOTHED = ("cdpo", "robust", "exo_pair", "aot", "aot_unpaired")
"""Losses that use ``--label-smoothing``."""

MUST_SMOOTH = ("cdpo", "robust", "exo_pair")
"""Losses that are another one, or undefined, without it."""


def with_learning_rate(method: Method, config: TuneConfig) -> TuneConfig:
    """Return the settings with the learning rate of the method and the model, unless one is given."""
    if config.optim.learning_rate:
        return config
    shape = read_shape(config.model.model)
    size = LARGE if shape is None else shape.parameters
    rate = method.learning_rates[(size >= MEDIUM) + (size >= LARGE)]
    factor = ADAPTER_FACTOR if config.lora.lora_rank and size >= MEDIUM else 2 if config.lora.lora_rank else 1
    # Rounded, so that nobody reads the error of a binary product in the settings.
    return changed(config, learning_rate=round(rate * factor, 12))


def with_best(config: TuneConfig) -> TuneConfig:
    """Return the settings with the figure by which ``--early-stopping`` judges, unless one is named."""
    return changed(config, keep_best="loss") if config.eval.early_stopping and not config.eval.keep_best else config


def check(method: Method, config: TuneConfig, device: Literal["cpu", "cuda"]) -> None:
    """Check that settings go together, and with the kind of device that trains.

    Raises:
        ConfigError: For the first that does not.
    """
    for rule in RULES:
        rule(method, config)
    learner = learner_of(config, device)
    check_adapter(learner, config.lora)
    for name, value in needing_gpus(learner) if device == "cpu" else ():
        raise ConfigError(name, value, "needs a GPU, and this machine has none", "Leave the flag out.")
    frozen = bool(getattr(config.method, "teacher", "")) or (hasattr(config.method, "reference") and not config.lora.lora_rank)
    check_computation(learner, AlgoConfig(), config.lora, frozen=frozen)


def _packages(method: Method, config: TuneConfig) -> None:
    for name in ("datasets", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"agentrl {method.command}", name, "is a package that is not installed", "pip install 'agentrl[tune]'")


def check_data(method: Method, config: TuneConfig) -> None:
    """Refuse rows that are not there, or whose settings contradict each other.

    Raises:
        ConfigError: If so.
    """
    data = config.data
    if not data.data:
        raise ConfigError("--data", "", "is required", "Name a JSONL or Parquet file, a folder of them, or a data set of the hub.")
    check_files("--data", listed(data.data))
    check_files("--eval-data", listed(data.eval_data))
    check_probabilities("--data-probs", data.data_probs, "--data", listed(data.data))
    if data.input_template:
        check_template("--input-template", data.input_template)
    if data.overlong == "split" and method.form != "dialogue":
        raise ConfigError("--overlong", "split", "is for plain text", "Use drop or cut.")
    if isinstance(data, SftDataConfig) and data.quality_key:
        _check_quality(data.quality_template)


def _check_quality(template: str) -> None:
    try:
        names = sorted(name for _, name, _, _ in string.Formatter().parse(template) if name is not None)
    except ValueError:
        names = []
    if names != ["prompt", "quality"]:
        raise ConfigError(
            "--quality-template", template, "must hold {prompt} and {quality} once each", "For example '{prompt} <quality {quality}>'."
        )


def num_ranks(config: TuneConfig) -> int:
    """Return the number of ranks: those of torchrun or SLURM if one of them started this process, else ``--num-ranks``."""
    return world_size() if is_rank() else config.run.num_ranks


def micro_batch_tokens(config: TuneConfig, device: Literal["cpu", "cuda"]) -> int:
    """Return the tokens that go through the model at once on one rank of this kind of device."""
    if given := config.optim.micro_batch_tokens or config.optim.micro_batch_size * config.data.max_length:
        return given
    shape = read_shape(config.model.model)
    medium = shape is None or shape.parameters >= MEDIUM
    return MICRO_TOKENS_OF_CPU if device == "cpu" and medium else MICRO_TOKENS


SAME = (*(item.name for item in fields(ComputeConfig)), "zero_stage", "learning_rate", "lr_schedule", "gradient_checkpointing")
"""Settings that the learner has under the same names."""


def learner_of(config: TuneConfig, device: Literal["cpu", "cuda"]) -> LearnerConfig:
    """Return the settings of the learner for a run: of PyTorch alone where that does everything they ask for, else of DeepSpeed."""
    optim = config.optim
    learner = LearnerConfig(
        num_learners=num_ranks(config),
        learner_dtype="bfloat16" if optim.weight_dtype == "bfloat16" else optim.dtype,
        micro_batch_tokens=micro_batch_tokens(config, device),
        train_vision=True,
        **{name: getattr(optim, name) for name in SAME},
    )
    if learner.dtype(device) == "bfloat16":
        return learner
    alone = replace(learner, learner_backend="torch")
    try:
        facts_of_backend(alone.learner_backend).check(alone, AlgoConfig(), config.lora)
    except ConfigError:
        return learner
    return alone


def earlier_words(config: TuneConfig) -> tuple[str, ...]:
    """Return what the settings that are words of earlier versions mean now, in lines."""
    rows, lines = config.optim.micro_batch_size, []
    if rows:
        tokens = rows * config.data.max_length
        lines.append(f"--micro-batch-size {rows} is --micro-batch-tokens {tokens} now: so many times --max-length")
    if getattr(config.method, "packing", False):
        lines.append("--packing is unnecessary: rows always follow each other without padding where the model allows it")
    return tuple(lines)


def _ranks(method: Method, config: TuneConfig) -> None:
    if is_rank() and config.run.run_dir is None and not config.run.resume:
        problem = "is required where torchrun or srun starts the ranks, which must agree on it"
        raise ConfigError("--run-dir", None, problem, "Name a directory that all of them see.")


def _runtime(method: Method, config: TuneConfig) -> None:
    run = config.run
    if is_rank() and (run.runtime == "ray" or run.ray_address):
        raise ConfigError("--runtime", "ray", "places ranks, which torchrun or srun has started here already", "Leave one of the two out.")
    if run.runtime == "local" and run.ray_address:
        raise ConfigError("--ray-address", run.ray_address, "has no effect with --runtime local", "Leave one of the two out.")


def _computation(method: Method, config: TuneConfig) -> None:
    optim = config.optim
    if optim.micro_batch_size and optim.micro_batch_tokens:
        problem = "is the earlier form of --micro-batch-tokens, which is given too"
        raise ConfigError("--micro-batch-size", optim.micro_batch_size, problem, "Leave it out.")
    if optim.liger_kernels:
        raise ConfigError("--liger-kernels", True, "is not known to the learner, which has other kernels", "Leave it out.")
    if optim.weight_dtype == "bfloat16" and optim.dtype == "float32":
        raise ConfigError("--dtype", "float32", "computes in more digits than --weight-dtype bfloat16 holds", "Leave one of the two out.")


def _models(method: Method, config: TuneConfig) -> None:
    for name, value in named_models(config):
        if holds_adapter(Path(value).expanduser()):
            problem = "holds an adapter without its model"
            raise ConfigError(name, value, problem, f"Merge it first: agentrl merge {value} --output DIR.")
    teacher = getattr(config.method, "teacher", None)
    if teacher == "":
        raise ConfigError("--teacher", "", "is required", "Name the model to learn from.")


def named_models(config: TuneConfig) -> list[tuple[str, str]]:
    """Return the flags that name models, with what they name."""
    named = [("--model", config.model.model)]
    named += [(flag(name), getattr(config.method, name)) for name in ("reference", "teacher") if hasattr(config.method, name)]
    return [(name, value) for name, value in named if value]


def check_models(config: TuneConfig) -> None:
    """Check that the named models can be found, and that a teacher has the model's tokens: these are read, so data come first.

    Raises:
        ConfigError: If not.
    """
    for setting, name in named_models(config):
        check_model(name, setting)
    if teacher := getattr(config.method, "teacher", ""):
        check_teacher(teacher, model_path(config.model.model), trust_remote_code=config.model.trust_remote_code)


def _chat_template(method: Method, config: TuneConfig) -> None:
    check_chat_template(config.model.chat_template, config.model.chat_template_kwargs)


def _method(method: Method, config: TuneConfig) -> None:
    own = config.method
    if own.loss and (is_plugin(own.loss) or "loss" not in option_names(facts_of(OBJECTIVES[method.command]).options)):
        check_objective(method.command, own.loss)
    if method.command == "kto" and config.optim.batch_size < 2:
        problem = "leaves one row in a step, and the KL estimate of KTO needs at least 2"
        raise ConfigError("--batch-size", config.optim.batch_size, problem, "Raise it.")
    if isinstance(own, DpoMethodConfig):
        _check_dpo(own)
    if (reference := getattr(own, "reference", "")) and config.lora.lora_rank:
        raise ConfigError(
            "--reference", reference, "is the model without its adapter where there is --lora-rank", "Leave one of the two out."
        )


def _check_dpo(own: DpoMethodConfig) -> None:
    if own.label_smoothing and own.loss not in SMOOTHED:
        problem = f"has no effect with --loss {own.loss}"
        remedy = "Use --loss cdpo." if own.loss == "sigmoid" else "Leave it out."
        raise ConfigError("--label-smoothing", own.label_smoothing, problem, remedy)
    if own.loss in MUST_SMOOTH and not own.label_smoothing:
        raise ConfigError("--loss", own.loss, "needs --label-smoothing above 0", "Give the share of wrong labels, 0.1 for example.")


def _evaluation(method: Method, config: TuneConfig) -> None:
    rows = config.data.eval_data or config.data.eval_size != 0
    figures = ("loss", *method.metrics)
    best = config.eval.keep_best.removeprefix("eval/")
    if config.eval.eval_every and not rows:
        raise ConfigError("--eval-every", config.eval.eval_every, "has no rows to evaluate on", "Add --eval-size N or --eval-data.")
    if best and not rows:
        raise ConfigError("--keep-best", best, "is measured on held-out rows, and there are none", "Add --eval-size N or --eval-data.")
    if best and best not in figures:
        raise ConfigError("--keep-best", best, "is no figure of this method", f"Figures: {', '.join(figures)}.")
    if config.eval.early_stopping and not config.eval.eval_every:
        raise ConfigError("--early-stopping", config.eval.early_stopping, "counts evaluations, and there are none", "Add --eval-every N.")


def _resume(method: Method, config: TuneConfig) -> None:
    if config.run.resume == "auto" and config.run.run_dir is None:
        raise ConfigError("--resume", "auto", "needs to know which run", "Give --run-dir, the same each time.")


RULES: tuple[Callable[[Method, TuneConfig], None], ...] = (
    *(_packages, check_data, _ranks, _runtime, _computation),
    *(_models, _chat_template, _method, _evaluation, _resume),
)
