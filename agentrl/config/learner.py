"""Settings of the learner, and the rules that they obey among themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Le, Lt

from agentrl.algo.estimators import estimator_facts
from agentrl.config.sections import Count, CountOrZero, Fraction, NonNegative, Positive, flag
from agentrl.core.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.config.schema import TrainConfig


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """DeepSpeed."""

    num_learners: Count = 1
    """Data-parallel learner ranks."""
    zero_stage: Annotated[int, Ge(0), Le(3)] = 2
    """DeepSpeed ZeRO stage, 0 to 3; in bfloat16 0 means 1, which sums the gradients of micro-batches in float32."""
    zero_hpz_size: Count = 1
    """Ranks, those of one machine, that also hold the whole parameters among themselves, so that the backward pass gathers no weights from
    other machines (hpZ, ZeRO 3); divides ``--num-learners``."""
    zero_quantized_weights: bool = False
    """Gather parameters in 8 bits (ZeRO 3, GPU)."""
    zero_quantized_gradients: bool = False
    """Sum gradients over ranks in 4 bits within a machine and 8 between machines (ZeRO 3, GPU)."""
    fp32_communication: bool = False
    """Sum gradients over ranks in float32 where training is in bfloat16; twice the traffic (ZeRO 1 to 3)."""
    learner_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of training. ``auto``: float32 on CPU, bfloat16 on GPU."""
    learning_rate: NonNegative = 5e-4
    """Peak learning rate of the policy. By model, unless given: 1e-5 from 5e7 parameters, 1e-6 from 5e8; ten times as much with
    ``--lora-rank``, 2e-3 beside the bundled model."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up."""
    lr_warmup_steps: CountOrZero = 0
    """Steps over which the learning rate rises from 0."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of ``linear`` and ``cosine``, as a share of the peak."""
    weight_decay: NonNegative = 0.0
    """AdamW weight decay."""
    adam_beta1: Fraction = 0.9
    """AdamW first-moment decay."""
    adam_beta2: Fraction = 0.95
    """AdamW second-moment decay."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this global norm."""
    micro_batch_tokens: Count = 16384
    """Tokens, padding included, that go through the model at once on one rank. By model, unless given: 8192 from 2e10 parameters."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time. By model, unless given: on from 5e8 parameters."""
    activation_offload: bool = False
    """Keep the activations that ``--gradient-checkpointing`` saves in CPU memory."""
    tiled_mlp: bool = False
    """Run the MLP of each layer over a part of the tokens at a time and again in the backward pass (long rows)."""
    sequence_parallel: Count = 1
    """Learner ranks that run each micro-batch together, each with a part of the tokens (long rows); divides ``--num-learners``."""
    learner_tensor_parallel: Count = 1
    """Learner ranks that run each micro-batch together, each with a part of every layer (DeepSpeed AutoTP); divides ``--num-learners``."""
    attn_implementation: Literal["auto", "sdpa", "eager", "varlen", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention kernel of the learner's model. ``sdpa`` and ``eager`` pad rows, the others put them back to back. ``auto``: ``sdpa`` on
    CPU, the newest flash attention installed on GPU, or else ``varlen`` (torch's own)."""
    fp32_lm_head: bool = False
    """Compute the logits of training in float32 where the rest is bfloat16."""
    share_prompts: bool = True
    """Compute a prompt once for all members of a group, where the model attends to everything and the kernel is not ``eager``."""
    optimizer_offload: bool = False
    """Keep optimizer state in CPU memory, and update there by torch's fused AdamW (GPU training, ZeRO 1 to 3)."""
    reference_offload: bool = False
    """Keep the models of ``--init-kl-coef`` and ``--teacher`` in CPU memory, and on the GPU only while they score a step (GPU training)."""
    ema_offload: bool = False
    """Keep the moving average of ``--ema-decay`` in CPU memory (GPU training)."""
    compile_layers: bool = False
    """Compile each layer of the model with ``torch.compile``; the first steps take minutes (ZeRO 0 to 2)."""
    deepcompile: bool = False
    """Compile the whole policy with DeepSpeed's DeepCompile, which orders ZeRO's communication within the graph (GPU, ZeRO 1 to 3)."""
    ema_decay: Annotated[float, Ge(0), Lt(1)] | None = None
    """Keep an exponential moving average of the policy with this decay and save it beside the model; typically 0.99."""
    critic_learning_rate: NonNegative = 1e-3
    """Peak learning rate of the critic of ``gae``; schedule and optimizer are those of the policy. By model, unless given: 1e-4 from 5e7
    parameters, 1e-5 from 5e8."""
    critic_warmup_steps: CountOrZero = 0
    """First steps in which only the critic is trained."""
    value_clip: Positive | None = 0.2
    """Distance that a value may move from its state when the batch was taken; none switches clipping off."""
    max_nonfinite_steps: Count = 3
    """Stop after this many steps in a row whose gradient is not finite; each of them is skipped."""


def check_learner(config: TrainConfig) -> None:
    """Check the settings of the learner against each other.

    Raises:
        ConfigError: For the first setting that has no effect, or excludes another.
    """
    learner = config.learner
    if learner.activation_offload and not learner.gradient_checkpointing:
        raise ConfigError("--activation-offload", True, "moves what --gradient-checkpointing saves", "Add --gradient-checkpointing.")
    if learner.tiled_mlp and config.lora.lora_rank:
        raise ConfigError("--tiled-mlp", True, "does not go with --lora-rank", "Set one of them only.")
    _check_zero(config)
    _check_offload(config)
    if learner.deepcompile:
        _check_deepcompile(config)
    if learner.learner_tensor_parallel > 1:
        _check_tensor_parallel(config)
    if learner.sequence_parallel > 1:
        _check_sequence_parallel(config)


def _check_zero(config: TrainConfig) -> None:
    learner = config.learner
    for name in ("zero_hpz_size", "zero_quantized_weights", "zero_quantized_gradients"):
        value = getattr(learner, name)
        if value != getattr(LearnerConfig, name) and learner.zero_stage != 3:
            problem = f"has no effect with --zero-stage {learner.zero_stage}"
            raise ConfigError(flag(name), value, problem, "Add --zero-stage 3, or leave it out.")
    if learner.num_learners % learner.zero_hpz_size:
        problem = f"does not divide --num-learners {learner.num_learners}"
        raise ConfigError("--zero-hpz-size", learner.zero_hpz_size, problem, "Use the number of learner ranks on a machine.")
    if learner.zero_hpz_size > 1 and estimator_facts(config.algo.advantage_estimator).needs_critic:
        problem = "serves one trained model, and this estimator trains a critic beside the policy"
        raise ConfigError("--zero-hpz-size", learner.zero_hpz_size, problem, "Leave it out, or use another --advantage-estimator.")
    if learner.fp32_communication and not learner.zero_stage:
        raise ConfigError("--fp32-communication", True, "has no effect with --zero-stage 0", "Leave one of the two out.")
    if learner.compile_layers and learner.zero_stage == 3:
        problem = "cannot compile layers whose parameters are gathered as they run"
        raise ConfigError("--compile-layers", True, problem, "Use --zero-stage 2, or leave it out.")
    if learner.compile_layers and learner.tiled_mlp:
        raise ConfigError("--compile-layers", True, "does not go with --tiled-mlp", "Set one of them only.")


def _check_deepcompile(config: TrainConfig) -> None:
    learner = config.learner
    if not learner.zero_stage:
        raise ConfigError("--deepcompile", True, "has no effect with --zero-stage 0", "Use --zero-stage 1, 2 or 3.")
    if estimator_facts(config.algo.advantage_estimator).needs_critic:
        problem = "compiles one trained model, and this estimator trains a critic beside the policy"
        raise ConfigError("--deepcompile", True, problem, "Leave it out, or use another --advantage-estimator.")
    others = (
        ("--compile-layers", learner.compile_layers),
        ("--router-replay", config.algo.router_replay),
        ("--lora-rank", config.lora.lora_rank),
        ("--sequence-parallel", learner.sequence_parallel > 1),
        ("--learner-tensor-parallel", learner.learner_tensor_parallel > 1),
        ("--tiled-mlp", learner.tiled_mlp),
        ("--activation-offload", learner.activation_offload),
        ("--optimizer-offload", learner.optimizer_offload),
        ("--zero-hpz-size", learner.zero_hpz_size > 1),
        ("--zero-quantized-weights", learner.zero_quantized_weights),
        ("--zero-quantized-gradients", learner.zero_quantized_gradients),
    )
    for name, given in others:
        if given:
            raise ConfigError("--deepcompile", True, f"does not go with {name}", "Leave out one of the two.")


def _check_offload(config: TrainConfig) -> None:
    learner = config.learner
    if learner.reference_offload and not config.algo.teacher and (not config.algo.init_kl_coef or config.lora.lora_rank):
        problem = "has no effect: the reference is the model with its adapter off" if config.lora.lora_rank else "has nothing to move"
        raise ConfigError("--reference-offload", True, problem, "Leave it out; --init-kl-coef without --lora-rank loads a reference model.")
    if learner.ema_offload and learner.ema_decay is None:
        raise ConfigError("--ema-offload", True, "has nothing to move", "Add --ema-decay 0.99, or leave it out.")
    if learner.optimizer_offload and not learner.zero_stage:
        raise ConfigError("--optimizer-offload", True, "has no effect with --zero-stage 0", "Use --zero-stage 1, 2 or 3.")


def _check_tensor_parallel(config: TrainConfig) -> None:
    learner, size = config.learner, config.learner.learner_tensor_parallel
    if learner.num_learners % size:
        why = f"does not divide --num-learners {learner.num_learners}"
        raise ConfigError("--learner-tensor-parallel", size, why, "Use a multiple of it for --num-learners.")
    others = (
        ("--lora-rank", config.lora.lora_rank),
        ("--aux-loss-coef", config.algo.aux_loss_coef),
        ("--router-replay", config.algo.router_replay),
        ("--ref-reset-every", config.algo.ref_reset_every),
        ("--ema-decay", learner.ema_decay is not None),
        ("--sequence-parallel", learner.sequence_parallel > 1),
        ("--zero-hpz-size", learner.zero_hpz_size > 1),
        ("--reference-offload", learner.reference_offload),
        ("--tiled-mlp", learner.tiled_mlp),
        ("--compile-layers", learner.compile_layers),
    )
    for name, given in others:
        if given:
            raise ConfigError("--learner-tensor-parallel", size, f"does not go with {name}", "Leave out one of the two.")


def _check_sequence_parallel(config: TrainConfig) -> None:
    learner, size = config.learner, config.learner.sequence_parallel
    if learner.num_learners % size:
        why = f"does not divide --num-learners {learner.num_learners}"
        raise ConfigError("--sequence-parallel", size, why, "Use a multiple of it for --num-learners.")
    if learner.attn_implementation in ("sdpa", "eager"):
        raise ConfigError("--sequence-parallel", size, f"needs packed rows, and {learner.attn_implementation} pads them", "Use varlen.")
    if config.algo.aux_loss_coef:
        raise ConfigError("--sequence-parallel", size, "does not go with --aux-loss-coef", "Set one of them only.")
