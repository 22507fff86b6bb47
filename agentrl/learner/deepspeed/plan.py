"""Facts and rules of DeepSpeed as a back-end of the learner: ZeRO, its offloading, and ranks that run micro-batches together."""

from __future__ import annotations

from agentrl.algo.estimators import estimator_facts
from agentrl.algo.plan import AlgoConfig
from agentrl.core.errors import ConfigError
from agentrl.learner.backends import BackendFacts, whole_states
from agentrl.learner.deepspeed.arguments import FLAG, OF_ZERO_3, ON_GPU, arguments, check_arguments, hpz_size
from agentrl.learner.optimizer_table import OPTIMIZERS
from agentrl.learner.plan import LearnerConfig, LoraConfig


def check(learner: LearnerConfig, algo: AlgoConfig, lora: LoraConfig) -> None:
    """Check the settings of DeepSpeed against each other and against others.

    Raises:
        ConfigError: For the first setting that has no effect, or excludes another.
    """
    check_arguments(learner)
    _check_optimizer(learner)
    _check_zero(learner, algo)
    if "optimizer" in learner.offload and not learner.zero_stage:
        raise ConfigError("--offload", "optimizer", "has no effect with --zero-stage 0", "Use --zero-stage 1, 2 or 3.")
    if "deepcompile" in arguments(learner):
        _check_deepcompile(learner, algo, lora)
    if learner.learner_tensor_parallel > 1:
        _check_tensor_parallel(learner, algo, lora)
    if learner.sequence_parallel > 1:
        _check_sequence_parallel(learner)


def _check_optimizer(learner: LearnerConfig) -> None:
    name = learner.optimizer
    if OPTIMIZERS[name].whole and learner.learner_dtype == "bfloat16":
        problem = f"has float32 master weights in ZeRO 1 to 3 only, and {name} needs --zero-stage 0"
        raise ConfigError("--learner-dtype", "bfloat16", problem, "Leave it out: --optimizer muon and adafactor train in float32.")
    others = (
        ("--offload", "optimizer", "optimizer" in learner.offload),
        (FLAG, "deepcompile", "deepcompile" in arguments(learner)),
        ("--learner-tensor-parallel", learner.learner_tensor_parallel, learner.learner_tensor_parallel > 1),
    )
    for flag, value, given in others:
        if given and name != "adamw":
            raise ConfigError(flag, value, f"goes with --optimizer adamw only, and not with {name}", "Leave out one of the two.")


def _check_zero(learner: LearnerConfig, algo: AlgoConfig) -> None:
    given, hpz = arguments(learner), f"zero_hpz_partition_size={hpz_size(learner)}"
    if learner.zero_stage != 3 and (unused := [name for name in OF_ZERO_3 if name in given]):
        problem = f"has no effect with --zero-stage {learner.zero_stage}"
        raise ConfigError(FLAG, unused[0], problem, "Add --zero-stage 3, or leave it out.")
    if learner.num_learners % hpz_size(learner):
        problem = f"does not divide --num-learners {learner.num_learners}"
        raise ConfigError(FLAG, hpz, problem, "Use the number of learner ranks on a machine.")
    if hpz_size(learner) > 1 and estimator_facts(algo.advantage_estimator).needs_critic:
        problem = "serves one trained model, and this estimator trains a critic beside the policy"
        raise ConfigError(FLAG, hpz, problem, "Leave it out, or use another --advantage-estimator.")
    if "communication_data_type" in given and not learner.zero_stage:
        raise ConfigError(FLAG, "communication_data_type", "has no effect with --zero-stage 0", "Leave one of the two out.")
    if learner.compile_layers and learner.zero_stage == 3:
        problem = "cannot compile layers whose parameters are gathered as they run"
        raise ConfigError("--compile-layers", True, problem, "Use --zero-stage 2, or leave it out.")
    if learner.compile_layers and learner.tiled_mlp:
        raise ConfigError("--compile-layers", True, "does not go with --tiled-mlp", "Set one of them only.")


def _check_deepcompile(learner: LearnerConfig, algo: AlgoConfig, lora: LoraConfig) -> None:
    if not learner.zero_stage:
        raise ConfigError(FLAG, "deepcompile", "has no effect with --zero-stage 0", "Use --zero-stage 1, 2 or 3.")
    if estimator_facts(algo.advantage_estimator).needs_critic:
        problem = "compiles one trained model, and this estimator trains a critic beside the policy"
        raise ConfigError(FLAG, "deepcompile", problem, "Leave it out, or use another --advantage-estimator.")
    others = (
        ("--compile-layers", learner.compile_layers),
        ("--router-replay", algo.router_replay),
        ("--lora-rank", lora.lora_rank),
        ("--sequence-parallel", learner.sequence_parallel > 1),
        ("--learner-tensor-parallel", learner.learner_tensor_parallel > 1),
        ("--tiled-mlp", learner.tiled_mlp),
        ("--offload activations", "activations" in learner.offload),
        ("--offload optimizer", "optimizer" in learner.offload),
        *((name, name in arguments(learner)) for name in OF_ZERO_3),
    )
    for name, given in others:
        if given:
            raise ConfigError(FLAG, "deepcompile", f"does not go with {name}", "Leave out one of the two.")


def _check_tensor_parallel(learner: LearnerConfig, algo: AlgoConfig, lora: LoraConfig) -> None:
    size = learner.learner_tensor_parallel
    if learner.num_learners % size:
        why = f"does not divide --num-learners {learner.num_learners}"
        raise ConfigError("--learner-tensor-parallel", size, why, "Use a multiple of it for --num-learners.")
    others = (
        ("--lora-rank", lora.lora_rank),
        ("--aux-loss-coef", algo.aux_loss_coef),
        ("--router-replay", algo.router_replay),
        ("--ref-reset-every", algo.ref_reset_every),
        ("--ema-decay", learner.ema_decay is not None),
        ("--sequence-parallel", learner.sequence_parallel > 1),
        ("zero_hpz_partition_size", hpz_size(learner) > 1),
        ("--offload reference", "reference" in learner.offload),
        ("--tiled-mlp", learner.tiled_mlp),
        ("--compile-layers", learner.compile_layers),
    )
    for name, given in others:
        if given:
            raise ConfigError("--learner-tensor-parallel", size, f"does not go with {name}", "Leave out one of the two.")


def _check_sequence_parallel(learner: LearnerConfig) -> None:
    size = learner.sequence_parallel
    if learner.num_learners % size:
        why = f"does not divide --num-learners {learner.num_learners}"
        raise ConfigError("--sequence-parallel", size, why, "Use a multiple of it for --num-learners.")
    if learner.attn_implementation in ("sdpa", "eager"):
        raise ConfigError("--sequence-parallel", size, f"needs packed rows, and {learner.attn_implementation} pads them", "Use varlen.")


def check_dora(lora: LoraConfig, zero_stage: int) -> None:
    """Refuse DoRA where its layers would find only a part of a weight, whose rows they measure.

    Raises:
        ConfigError: If so.
    """
    if "dora" in lora.lora_variant and zero_stage == 3:
        problem = "keeps a part of each weight, and DoRA (--lora-variant dora) measures whole rows"
        raise ConfigError("--zero-stage", 3, problem, "Use --zero-stage 2, or leave out dora.")


def check_divided_4bit(zero_stage: int) -> None:
    """Refuse frozen weights in 4 bits where ZeRO would divide them.

    Raises:
        ConfigError: If so.
    """
    if zero_stage == 3:
        problem = "cannot spread weights in 4 bits over ranks"
        raise ConfigError("--zero-stage", 3, problem, "Use --zero-stage 2, or leave out --load-in-4bit.")


def check_flattened(optimizer: str, zero_stage: int) -> None:
    """Refuse an optimizer of whole matrices where ZeRO gives it parts of them.

    Raises:
        ConfigError: If so.
    """
    if OPTIMIZERS[optimizer].whole and zero_stage:
        problem = f"gives optimizers flattened parts of matrices, and {optimizer} needs whole ones"
        raise ConfigError("--zero-stage", zero_stage, problem, "Use --zero-stage 0, or --optimizer adamw or adamw_8bit.")


def states(size: int, learner: LearnerConfig, *, width: int, outside: int = 0) -> tuple[float, float, float]:
    """Return the bytes of parameters, gradients and optimizer of one trained model on one rank; see `agentrl.learner.backends.States`.

    The optimizer has its state, and master weights unless it trains in float32 without ZeRO. ZeRO-1 sums the gradients of all parameters in
    float32 before it divides them; bfloat16 has at least that.
    """
    stage, ranks = max(learner.zero_stage, int(width == 2)), learner.num_learners
    sharded = size * learner.learner_tensor_parallel / ranks
    parameters = (sharded if stage == 3 else size) * width
    if stage == 0:
        return whole_states(size, learner.optimizer, outside=outside)
    gradients = (size if stage == 1 else sharded) * 4
    return parameters, gradients, sharded * (4 + OPTIMIZERS[learner.optimizer].state_bytes)


def copies(size: int, learner: LearnerConfig, *, width: int) -> dict[str, float]:
    """Return the bytes of the second copy of the weights that the ranks of a machine divide among themselves (hpZ)."""
    ranks = hpz_size(learner)
    return {"second copy (hpZ)": size * width / ranks} if ranks > 1 and learner.zero_stage == 3 else {}


def on_gpu(learner: LearnerConfig) -> tuple[str, ...]:
    """Return the arguments of DeepSpeed's that need a GPU, among those that are given."""
    return tuple(name for name in ON_GPU if name in arguments(learner))


FACTS = BackendFacts(check=check, states=states, copies=copies, on_gpu=on_gpu, packages=("deepspeed",))
