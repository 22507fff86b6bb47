"""From settings to the trainer of a method and its arguments."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainingArguments

from agentrl.assets import model_path
from agentrl.config.methods import Method
from agentrl.config.tune import OptimConfig, ProcessMethodConfig
from agentrl.core.errors import ConfigError
from agentrl.core.language_models import CLASSES, LABELS, language_model
from agentrl.core.model_shape import trained_positions
from agentrl.learner.dropout import disable_dropout
from agentrl.learner.lora import outside_text
from agentrl.learner.plan import ALL_LINEAR, LearnerConfig, LoraConfig
from agentrl.learner.quantised import quantisation, use_one_product
from agentrl.resolve.tune import TunePlan
from agentrl.rollout.plan import ModelConfig
from agentrl.tune.directory import CHECKPOINTS
from agentrl.tune.objectives import OBJECTIVES
from agentrl.tune.prepare import image_reader
from agentrl.tune.trainer import Collator, MethodTrainer
from agentrl.weights.rope import fix_rope


def arguments(plan: TunePlan, run_dir: Path, steps: int, *, evaluate_first: bool) -> dict[str, Any]:
    """Return the arguments that trainers of transformers share, for a run of so many steps."""
    optim, ranks, size = plan.settings.optim, plan.ranks.num_ranks, plan.ranks.micro_batch_size
    cuda = torch.cuda.is_available()
    # The schedule that transformers calls constant has no warm-up.
    shape = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}[optim.lr_schedule]
    given: dict[str, Any] = {
        "output_dir": str(run_dir / CHECKPOINTS),
        "max_steps": steps,
        "per_device_train_batch_size": size,
        "per_device_eval_batch_size": size,
        "gradient_accumulation_steps": optim.batch_size // ranks // size,
        "learning_rate": optim.learning_rate,
        "lr_scheduler_type": shape,
        "warmup_steps": optim.lr_warmup_steps,
        "weight_decay": optim.weight_decay,
        "adam_beta1": optim.adam_beta1,
        "adam_beta2": optim.adam_beta2,
        "max_grad_norm": optim.max_grad_norm,
        "optim": "adamw_torch",
        "bf16": "bfloat16" in (optim.dtype, optim.weight_dtype) or (optim.dtype == "auto" and cuda),
        "use_cpu": not cuda,
        "gradient_checkpointing": optim.gradient_checkpointing,
        "train_sampling_strategy": "sequential",  # rows come in the order in which they are drawn
        "seed": plan.settings.run.seed,
        "eval_on_start": evaluate_first,
        "eval_strategy": "no",  # what follows a step is for `Follower` to say
        "save_strategy": "no",
        "logging_strategy": "no",
        # Else transformers shows the mean of earlier losses in the place of one that is not finite.
        "logging_nan_inf_filter": False,
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "dataloader_pin_memory": cuda,
        # The collator reads columns that the model does not take.
        "remove_unused_columns": False,
        "include_num_input_tokens_seen": "non_padding",
    }
    if optim.gradient_checkpointing and optim.zero_stage == 3 and plan.settings.lora.lora_rank:
        # DeepSpeed checks the shapes of recomputed tensors, and finds those of parameters that it has let go of.
        given["gradient_checkpointing_kwargs"] = {"use_reentrant": True}
    if optim.zero_stage:
        given["deepspeed"] = deepspeed_settings(optim.zero_stage)
    if not cuda and ranks > 1:
        given["ddp_backend"] = "gloo"
    if optim.liger_kernels:  # losses are computed here, from logits
        given["use_liger_kernel"] = True
        given["liger_kernel_config"] = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    return given


def deepspeed_settings(stage: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration; transformers fills in what is ``auto`` from its own arguments."""
    from agentrl.learner.deepspeed.options import zero_config

    zero = zero_config(LearnerConfig(zero_stage=stage))
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


def build_trainer(plan: TunePlan, given: dict[str, Any], tokenizer: Any, train: Any, held_out: Any) -> MethodTrainer:
    """Return the trainer of a run.

    Args:
        plan: The run.
        given: What `arguments` returned.
        tokenizer: Of the model; it gets a padding token if it has none.
        train: Rows to train on, in the order in which they are drawn.
        held_out: Rows to evaluate on; `None` if there are none.

    Raises:
        ConfigError: If the model cannot be loaded for the method, or has no such layers for an adapter.
    """
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    settings, command = plan.settings, plan.method.command
    reader = image_reader(settings.model, settings.images)
    rows = {"train_dataset": train, "eval_dataset": held_out, "data_collator": Collator(tokenizer.pad_token_id, reader)}
    args = TrainingArguments(**given)  # before models are loaded, which ZeRO-3 divides while they are
    try:
        objective = functools.partial(OBJECTIVES[command], settings.method, _frozen_model(plan, args))
        model = _trained_model(plan, tokenizer.pad_token_id, bf16=args.bf16)
    except (OSError, ValueError, KeyError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(f"agentrl {command}", model_path(settings.model.model), f"cannot be trained: {reason}", "See --debug.") from error
    optimizer = None if settings.optim.optimizer == "adamw" else functools.partial(_optimizer, settings.optim)
    return MethodTrainer(objective=objective, optimizer=optimizer, model=model, args=args, processing_class=tokenizer, **rows)


def _optimizer(optim: OptimConfig, model: Any) -> torch.optim.Optimizer:
    """Return an optimizer that is another one than the AdamW of transformers, or made in another way."""
    from agentrl.learner.optimizers import build_optimizer

    if optim.zero_stage < 3:
        return build_optimizer(model, optim)
    from agentrl.learner.deepspeed.parameters import PARAMETERS

    return build_optimizer(model, optim, PARAMETERS)


def record_ends(model: Any, tokenizer: Any, ends: Sequence[int]) -> None:
    """Let generation stop at the tokens that end trained answers; the most frequent becomes the tokenizer's own.

    A tokenizer whose end token ends answers, or is written by its chat template, keeps it.
    """
    if not ends or not model.can_generate():
        return
    if tokenizer.eos_token_id not in ends and "eos_token" not in str(tokenizer.chat_template or ""):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
    known = model.generation_config.eos_token_id
    known = [] if known is None else known if isinstance(known, list) else [known]
    model.generation_config.eos_token_id = list(dict.fromkeys([*ends, *known]))


def _trained_model(plan: TunePlan, pad_token_id: int, *, bf16: bool = False) -> Any:
    """Return the model to train, with its adapter if it gets one."""
    settings, method = plan.settings, plan.method
    transformers.set_seed(settings.run.seed)
    model = _loaded(method, settings.model, settings.optim, bf16=bf16)
    model.config.get_text_config().pad_token_id = pad_token_id
    if model.can_generate():
        model.generation_config.pad_token_id = pad_token_id
    if isinstance(settings.method, ProcessMethodConfig):
        model.config.step_separator = settings.method.step_separator
    _fix_rope(model, settings.data.max_length)
    if method.without_dropout:
        disable_dropout(model)
    if not settings.lora.lora_rank:
        return model
    from peft import get_peft_model

    # DeepSpeed gathers small parameters in one buffer, which has one data type.
    model = get_peft_model(
        model, adapter(method, settings.lora, outside_text(model)), autocast_adapter_dtype=settings.optim.zero_stage != 3
    )
    if settings.optim.gradient_checkpointing:
        # Embeddings are frozen, so without this a recomputed block has no input with a gradient, and gets none.
        model.enable_input_require_grads()
    return model


def _loaded(method: Method, model: ModelConfig, optim: OptimConfig, *, bf16: bool) -> Any:
    """Return the model in the data type of its weights, or with frozen ones in 4 bits that compute in bfloat16 with `bf16`."""
    path, trusted = model_path(model.model), model.trust_remote_code
    kind = CLASSES[method.task](path, trust_remote_code=trusted)
    given: dict[str, Any] = {"num_labels": LABELS[method.task]} if method.task in LABELS else {}
    if optim.load_in_4bit:
        given["quantization_config"] = quantisation(torch.bfloat16 if bf16 else torch.float32, method.head)
        if torch.cuda.is_available():
            given["device_map"] = {"": torch.cuda.current_device()}
    loaded = kind.from_pretrained(path, dtype=getattr(torch, optim.weight_dtype), trust_remote_code=trusted, **given)
    if optim.load_in_4bit:
        use_one_product(loaded)
    return loaded


def _frozen_model(plan: TunePlan, args: TrainingArguments) -> Any:
    """Return the teacher or the reference model; `None` if there is none, or if it is the model without its adapter."""
    settings, own = plan.settings, plan.settings.method
    name = getattr(own, "teacher", "") or getattr(own, "reference", "")
    if not name and (not hasattr(own, "reference") or settings.lora.lora_rank):
        return None
    dtype = torch.bfloat16 if args.bf16 and settings.optim.zero_stage else torch.float32  # as DeepSpeed has the trained model
    trusted = settings.model.trust_remote_code
    path = name or model_path(settings.model.model)
    model = language_model(path, trust_remote_code=trusted).from_pretrained(path, dtype=dtype, trust_remote_code=trusted)
    _fix_rope(model, settings.data.max_length)
    if settings.optim.zero_stage < 3:
        return model.to(args.device).requires_grad_(False).eval()
    from agentrl.learner.deepspeed.engine import partition_frozen

    return partition_frozen(model, LearnerConfig(zero_stage=3), bf16=args.bf16)


def _fix_rope(model: Any, max_length: int) -> None:
    """Give a model the rotary positions that engines give it: those of its training, unless rows may be longer."""
    own = trained_positions(model.config)
    if own:  # other models have the same positions in rows of any length
        fix_rope(model, max(own, max_length), "--max-length")


def adapter(method: Method, lora: LoraConfig, without: Sequence[str] = ()) -> Any:
    """Return peft's settings of the adapter; layers named in `without` get none."""
    import peft

    names = lora.target_names
    return peft.LoraConfig(
        r=lora.lora_rank,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        target_modules=names[0] if names == (ALL_LINEAR,) else list(names),
        exclude_modules=list(without) or None,
        task_type=method.task,
        modules_to_save=list(method.head) or None,
    )
