"""Rules between the settings of a method, and the learning rate that follows from them; nothing heavy is imported."""

from __future__ import annotations

import importlib.util
import string
from collections.abc import Callable
from pathlib import Path

from agentrl.algo.facts import facts_of
from agentrl.algo.objectives import OBJECTIVES, check_objective
from agentrl.algo.options import option_names
from agentrl.assets import model_path
from agentrl.config.data_rules import check_chat_template, check_files, check_probabilities, check_template
from agentrl.config.learner_rules import check_4bit, check_optimizer
from agentrl.config.methods import Method
from agentrl.config.model_defaults import ADAPTER_FACTOR, LARGE, MEDIUM
from agentrl.config.sections import changed
from agentrl.config.tune import (
    DpoMethodConfig,
    SftDataConfig,
    TuneConfig,
)
from agentrl.core.adapter_files import holds_adapter
from agentrl.core.errors import ConfigError
from agentrl.core.model_shape import read_shape
from agentrl.core.plugins import is_plugin
from agentrl.core.settings import flag, listed, refuse_set
from agentrl.core.tokenizers import check_teacher
from agentrl.learner.deepspeed.plan import check_dora
from agentrl.resolve.ranks import is_rank, world_size
from agentrl.rollout.tasks import check_model

MAX_MICRO = 8
"""Rows that go through the model at once where nothing is said."""

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


def check(method: Method, config: TuneConfig) -> None:
    """Check that settings go together.

    Raises:
        ConfigError: For the first that does not.
    """
    for rule in RULES:
        rule(method, config)


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


def micro_batch(config: TuneConfig) -> int:
    """Return the rows that go through the model at once on one rank."""
    return config.optim.micro_batch_size or min(MAX_MICRO, -(-config.optim.batch_size // num_ranks(config)))


def _optimizer(method: Method, config: TuneConfig) -> None:
    check_optimizer(config.optim)


def _ranks(method: Method, config: TuneConfig) -> None:
    if is_rank() and config.run.run_dir is None and not config.run.resume:
        problem = "is required where torchrun or srun starts the ranks, which must agree on it"
        raise ConfigError("--run-dir", None, problem, "Name a directory that all of them see.")


def _lora(method: Method, config: TuneConfig) -> None:
    lora = config.lora
    if not lora.lora_rank:
        unused = "has no effect without an adapter", "Add --lora-rank 16, or leave it out."
        refuse_set(lora, (), *unused)
        refuse_set(config.optim, ("load_in_4bit",), *unused)
        return
    if not lora.target_names:
        raise ConfigError("--lora-target-modules", lora.lora_target_modules, "names no layer", "Leave it out for all-linear.")
    check_dora(lora, config.optim.zero_stage)
    if config.optim.load_in_4bit:
        check_4bit(config.optim.zero_stage)


def _computation(method: Method, config: TuneConfig) -> None:
    optim = config.optim
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
    *(_packages, check_data, _optimizer, _ranks, _lora, _computation),
    *(_models, _chat_template, _method, _evaluation, _resume),
)
