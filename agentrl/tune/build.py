"""From settings to the trainer of a method and its arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from trl import DPOConfig, KTOConfig, RewardConfig, SFTConfig
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.utils import disable_dropout_in_model

from agentrl.config.lora import ALL_LINEAR
from agentrl.core.errors import ConfigError
from agentrl.learner.settings import BUCKET_ELEMENTS
from agentrl.tune import own, settings, trainers
from agentrl.tune.directory import CHECKPOINTS
from agentrl.tune.methods import Method
from agentrl.tune.prepare import model_path
from agentrl.tune.rules import micro_batch, num_ranks
from agentrl.tune.settings import TuneConfig

OURS = ("cdpo", "ipo_sum")
"""Losses of ``agentrl dpo`` that are not TRL's."""


def arguments(config: TuneConfig, run_dir: Path, steps: int, *, evaluate_first: bool) -> dict[str, Any]:
    """Return the arguments that trainers of transformers share, for a run of so many steps."""
    optim, size = config.optim, micro_batch(config)
    cuda = torch.cuda.is_available()
    shape = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}[optim.lr_schedule]
    given: dict[str, Any] = {
        "output_dir": str(run_dir / CHECKPOINTS),
        "max_steps": steps,
        "per_device_train_batch_size": size,
        "per_device_eval_batch_size": size,
        "gradient_accumulation_steps": optim.batch_size // num_ranks(config) // size,
        "learning_rate": optim.learning_rate,
        "lr_scheduler_type": shape,
        "warmup_steps": optim.lr_warmup_steps,
        "weight_decay": optim.weight_decay,
        "adam_beta1": optim.adam_beta1,
        "adam_beta2": optim.adam_beta2,
        "max_grad_norm": optim.max_grad_norm,
        "optim": "adamw_torch",
        "bf16": optim.dtype == "bfloat16" or (optim.dtype == "auto" and cuda),
        "use_cpu": not cuda,
        "gradient_checkpointing": optim.gradient_checkpointing,
        "train_sampling_strategy": "sequential",  # rows come in the order in which they are drawn
        "seed": config.run.seed,
        "eval_on_start": evaluate_first,
        "eval_strategy": "no",  # what follows a step is for `Follower` to say
        "save_strategy": "no",
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "dataloader_pin_memory": cuda,
    }
    if optim.zero_stage:
        given["deepspeed"] = deepspeed_settings(optim.zero_stage)
    if not cuda and num_ranks(config) > 1:
        given["ddp_backend"] = "gloo"
    return given


def deepspeed_settings(stage: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration; transformers fills in what is ``auto`` from its own arguments."""
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
        "overlap_comm": True,
    }
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }


def build_trainer(method: Method, config: TuneConfig, given: dict[str, Any], tokenizer: Any, train: Any, held_out: Any) -> Any:
    """Return the trainer of a method.

    Args:
        method: The method.
        config: Settings of the run.
        given: What `arguments` returned.
        tokenizer: Of the model; it gets a padding token if it has none.
        train: Rows to train on, in the order in which they are drawn.
        held_out: Rows to evaluate on; `None` if there are none.

    Raises:
        ConfigError: If the model cannot be loaded for the method, or has no such layers for an adapter.
    """
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    rest = {"train_dataset": train, "eval_dataset": held_out, "processing_class": tokenizer}
    try:
        return BUILDERS[method.command](config, given, {**rest, "peft_config": adapter(method, config)})
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(f"agentrl {method.command}", model_path(config), f"cannot be trained: {reason}", "See --debug.") from error


def adapter(method: Method, config: TuneConfig) -> Any:
    """Return peft's settings of the adapter; `None` without one."""
    lora = config.lora
    if not lora.lora_rank:
        return None
    from peft import LoraConfig

    names = lora.target_names
    return LoraConfig(
        r=lora.lora_rank,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=names[0] if names == (ALL_LINEAR,) else list(names),
        task_type=method.task,
        modules_to_save=list(method.head) or None,
    )


def _loading(config: TuneConfig) -> dict[str, Any]:
    """Return how TRL is to load the model: weights in float32, in which they are updated."""
    return {"model_init_kwargs": {"dtype": "float32"}, "trust_remote_code": config.model.trust_remote_code}


def _sft(config: TuneConfig, given: dict[str, Any], rest: dict[str, Any]) -> Any:
    own_ = config.method
    assert isinstance(own_, settings.SftMethodConfig)
    skip = {"skip_prepare_dataset": True}
    args = SFTConfig(
        **given, **_loading(config), dataset_kwargs=skip, packing=own_.packing, max_length=config.data.max_length, loss_type=own_.loss
    )
    return trainers.SupervisedTrainer(model=model_path(config), args=args, **rest)


def _reward_model(config: TuneConfig, given: dict[str, Any], rest: dict[str, Any]) -> Any:
    own_ = config.method
    assert isinstance(own_, settings.RewardMethodConfig)
    args = RewardConfig(**given, **_loading(config), max_length=None, center_rewards_coefficient=own_.center_rewards_coefficient or None)
    return trainers.PairRewardTrainer(model=model_path(config), args=args, **rest)


def _reference(config: TuneConfig, name: str) -> Any:
    """Return the reference model, if another one than the model itself is asked for."""
    if not name:
        return None
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, trust_remote_code=config.model.trust_remote_code)


def _dpo(config: TuneConfig, given: dict[str, Any], rest: dict[str, Any]) -> Any:
    own_ = config.method
    assert isinstance(own_, settings.DpoMethodConfig)
    loss = "sigmoid" if own_.loss in OURS else own_.loss
    args = DPOConfig(**given, **_loading(config), max_length=None, beta=own_.beta, loss_type=[loss], label_smoothing=own_.label_smoothing)
    reference = _reference(config, own_.reference)
    trainer = trainers.PreferenceTrainer(model=model_path(config), ref_model=reference, args=args, **rest)
    trainer.own_loss = own_.loss if own_.loss in OURS else ""
    return trainer


def _kto(config: TuneConfig, given: dict[str, Any], rest: dict[str, Any]) -> Any:
    own_ = config.method
    assert isinstance(own_, settings.KtoMethodConfig)
    weights: dict[str, Any] = {"desirable_weight": own_.desirable_weight, "undesirable_weight": own_.undesirable_weight}
    args = KTOConfig(**given, **_loading(config), max_length=None, beta=own_.beta, **weights)
    return trainers.LabelledTrainer(model=model_path(config), ref_model=_reference(config, own_.reference), args=args, **rest)


def _distill(config: TuneConfig, given: dict[str, Any], rest: dict[str, Any]) -> Any:
    own_ = config.method
    assert isinstance(own_, settings.DistillMethodConfig)
    args = SFTConfig(**given, **_loading(config), dataset_kwargs={"skip_prepare_dataset": True}, max_length=config.data.max_length)
    divergence: dict[str, Any] = {"teacher": own_.teacher, "beta": own_.beta, "temperature": own_.temperature}
    return trainers.DistillTrainer(model=model_path(config), args=args, **divergence, **rest)


def _plain(
    trainer: Callable[..., Any], kind: Any, collator: Any, config: TuneConfig, given: dict[str, Any], rest: dict[str, Any], **options: Any
) -> Any:
    """Return a trainer of ours: the model is loaded here, and its rows keep all of their columns."""
    args = transformers.TrainingArguments(**given, remove_unused_columns=False)
    transformers.set_seed(config.run.seed)
    model = kind.from_pretrained(model_path(config), dtype=torch.float32, trust_remote_code=config.model.trust_remote_code, **options)
    model.config.get_text_config().pad_token_id = rest["processing_class"].pad_token_id
    model.config.use_cache = False
    disable_dropout_in_model(model)  # as TRL does for its own; classifiers of tokens have some
    peft_config = rest.pop("peft_config")
    if peft_config is not None:
        from peft import get_peft_model

        model = get_peft_model(model, peft_config, autocast_adapter_dtype=config.optim.zero_stage != 3)
        if config.optim.gradient_checkpointing:
            model.enable_input_require_grads()
    return trainer(model=model, args=args, data_collator=collator, **rest)


def _orpo(config: TuneConfig, given: dict[str, Any], rest: dict[str, Any]) -> Any:
    assert isinstance(config.method, settings.OrpoMethodConfig)
    collator = DataCollatorForPreference(pad_token_id=rest["processing_class"].pad_token_id)
    trainer = _plain(own.OddsRatioTrainer, AutoModelForCausalLM, collator, config, given, rest)
    trainer.beta = config.method.beta
    return trainer


def _process_reward_model(config: TuneConfig, given: dict[str, Any], rest: dict[str, Any]) -> Any:
    collator = own.StepCollator(rest["processing_class"].pad_token_id)
    trainer = _plain(own.ProcessRewardTrainer, AutoModelForTokenClassification, collator, config, given, rest, num_labels=2)
    assert isinstance(config.method, settings.ProcessMethodConfig)
    trainer.model.config.step_separator = config.method.step_separator
    return trainer


BUILDERS: dict[str, Callable[[TuneConfig, dict[str, Any], dict[str, Any]], Any]] = {
    "sft": _sft,
    "reward-model": _reward_model,
    "process-reward-model": _process_reward_model,
    "dpo": _dpo,
    "kto": _kto,
    "orpo": _orpo,
    "distill": _distill,
}
"""Command -> function that makes its trainer."""
