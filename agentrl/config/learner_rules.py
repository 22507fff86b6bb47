"""Rules about the learner and its adapters: their settings go together."""

from __future__ import annotations

import importlib.util

from agentrl.algo.estimators import estimator_facts
from agentrl.algo.teacher_specs import learner_teacher
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import refuse_set
from agentrl.core.errors import ConfigError
from agentrl.engine.engine_args import NATIVE_RANKS
from agentrl.learner.optimizer_table import BETAS, OPTIMIZERS, OptimizerSettings
from agentrl.learner.plan import ALL_LINEAR, LoraConfig


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
    _check_optimizer(config)
    _check_zero(config)
    _check_offload(config)
    if learner.deepcompile:
        _check_deepcompile(config)
    if learner.learner_tensor_parallel > 1:
        _check_tensor_parallel(config)
    if learner.sequence_parallel > 1:
        _check_sequence_parallel(config)


def _check_optimizer(config: TrainConfig) -> None:
    learner, name = config.learner, config.learner.optimizer
    check_optimizer(learner)
    if OPTIMIZERS[name].whole and learner.learner_dtype == "bfloat16":
        problem = f"has float32 master weights in ZeRO 1 to 3 only, and {name} needs --zero-stage 0"
        raise ConfigError("--learner-dtype", "bfloat16", problem, "Leave it out: --optimizer muon and adafactor train in float32.")
    others = (
        ("--optimizer-offload", learner.optimizer_offload),
        ("--deepcompile", learner.deepcompile),
        ("--learner-tensor-parallel", learner.learner_tensor_parallel > 1),
    )
    for flag, given in others:
        if given and name != "adamw":
            raise ConfigError(flag, given, f"goes with --optimizer adamw only, and not with {name}", "Leave out one of the two.")


def _check_zero(config: TrainConfig) -> None:
    learner = config.learner
    if learner.zero_stage != 3:
        unused = ("zero_hpz_size", "zero_quantized_weights", "zero_quantized_gradients")
        refuse_set(learner, unused, f"has no effect with --zero-stage {learner.zero_stage}", "Add --zero-stage 3, or leave it out.")
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
    if learner.reference_offload and not learner_teacher(config.algo.teacher) and (not config.algo.init_kl_coef or config.lora.lora_rank):
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


def check_lora(config: TrainConfig) -> None:
    """Check the settings of adapters against each other and against the settings that they exclude.

    Raises:
        ConfigError: For the first setting that has no effect, or excludes another.
    """
    lora = config.lora
    if not lora.lora_rank:
        unused = "has no effect without an adapter", "Add --lora-rank 16, or leave it out."
        refuse_set(lora, (), *unused)
        refuse_set(config.weights, ("publish",), *unused)
        refuse_set(config.learner, ("load_in_4bit",), *unused)
        return
    if not lora.target_names:
        raise ConfigError("--lora-target-modules", lora.lora_target_modules, "names no layer", f"Leave it out for {ALL_LINEAR}.")
    if config.algo.ref_reset_every:
        problem = "cannot be done with --lora-rank: the reference is the model without its adapter"
        raise ConfigError("--ref-reset-every", config.algo.ref_reset_every, problem, "Leave one of the two out.")
    if lora.lora_dropout and config.algo.reuse_behaviour_logprobs:
        problem = "needs the log-probabilities of the model as it is in the step, and the recorded ones are of the whole adapter"
        raise ConfigError("--lora-dropout", lora.lora_dropout, problem, "Leave out --reuse-behaviour-logprobs.")
    check_dora(lora, config.learner.zero_stage)
    if config.weights.publish == "adapter":
        _check_native(config)
    if config.learner.load_in_4bit:
        _check_4bit(config)


def _check_native(config: TrainConfig) -> None:
    lora = config.lora
    if lora.use_dora:
        raise ConfigError("--use-dora", True, "cannot be published as an adapter: vLLM takes none of DoRA", "Leave out --publish.")
    if config.run.ray_address:
        problem = "hands engines a directory in memory, which other machines do not see"
        raise ConfigError("--publish", config.weights.publish, problem, "Leave out --publish or --ray-address.")
    if lora.lora_rank > NATIVE_RANKS[-1]:
        raise ConfigError("--lora-rank", lora.lora_rank, f"is above {NATIVE_RANKS[-1]}, the most that vLLM takes", "Leave out --publish.")


def _check_4bit(config: TrainConfig) -> None:
    if config.weights.publish == "adapter":
        problem = "would leave the model in the engines whole, and the learner's in 4 bits"
        raise ConfigError("--publish", config.weights.publish, problem, "Leave out --publish or --load-in-4bit.")
    check_4bit(config.learner.zero_stage)


def check_dora(lora: LoraConfig, zero_stage: int) -> None:
    """Refuse DoRA where its layers would find only a part of a weight, whose rows they measure.

    Raises:
        ConfigError: If so.
    """
    if lora.use_dora and zero_stage == 3:
        problem = "keeps a part of each weight, and DoRA (--use-dora) measures whole rows"
        raise ConfigError("--zero-stage", 3, problem, "Use --zero-stage 2, or leave out --use-dora.")


def check_4bit(zero_stage: int) -> None:
    """Refuse frozen weights in 4 bits where their package is missing, or ZeRO would divide them.

    Raises:
        ConfigError: If so.
    """
    if zero_stage == 3:
        problem = "cannot spread weights in 4 bits over ranks"
        raise ConfigError("--zero-stage", 3, problem, "Use --zero-stage 2, or leave out --load-in-4bit.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError("--load-in-4bit", True, "needs bitsandbytes, which is not installed", "pip install 'agentrl[qlora]'")


def check_optimizer(settings: OptimizerSettings) -> None:
    """Check that an optimizer is installed and works with the other settings.

    Raises:
        ConfigError: If its package is missing, the ZeRO stage gives it parts of matrices, or a setting has no effect on it.
    """
    name = settings.optimizer
    facts = OPTIMIZERS[name]
    if facts.package and importlib.util.find_spec(facts.package) is None:
        raise ConfigError("--optimizer", name, f"needs {facts.package}, which is not installed", "pip install 'agentrl[qlora]'")
    if facts.whole and settings.zero_stage:
        problem = f"gives optimizers flattened parts of matrices, and {name} needs whole ones"
        raise ConfigError("--zero-stage", settings.zero_stage, problem, "Use --zero-stage 0, or --optimizer adamw or adamw_8bit.")
    for flag, value, default in zip(("--adam-beta1", "--adam-beta2"), (settings.adam_beta1, settings.adam_beta2), BETAS, strict=True):
        if not facts.betas and value != default:
            raise ConfigError(flag, value, f"has no effect with --optimizer {name}", "Leave it out.")
