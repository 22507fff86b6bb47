"""Rules about the learner and its adapters: their settings go together."""

from __future__ import annotations

import importlib.util

from agentrl.algo.plan import AlgoConfig
from agentrl.algo.teacher_specs import learner_teacher
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.core.settings import refuse_set
from agentrl.engine.engine_args import NATIVE_RANKS
from agentrl.learner.backends import facts_of_backend
from agentrl.learner.deepspeed.plan import check_divided_4bit, check_dora, check_flattened
from agentrl.learner.optimizer_table import BETAS, OPTIMIZERS, OptimizerSettings
from agentrl.learner.plan import ALL_LINEAR, LearnerConfig, LoraConfig


def check_learner(config: TrainConfig) -> None:
    """Check the settings of the learner against each other, as `check_computation` does."""
    algo, lora = config.algo, config.lora
    referred = algo.init_kl_coef > 0 and not lora.lora_rank
    check_computation(config.learner, algo, lora, frozen=bool(learner_teacher(algo.teacher)) or referred)


def check_computation(learner: LearnerConfig, algo: AlgoConfig, lora: LoraConfig, *, frozen: bool) -> None:
    """Check the settings of a learner against each other; `frozen`: a reference model or a teacher is loaded beside what is trained.

    Raises:
        ConfigError: For the first setting that has no effect, or excludes another.
    """
    if "activations" in learner.offload and not learner.gradient_checkpointing:
        raise ConfigError("--offload", "activations", "moves what --gradient-checkpointing saves", "Add --gradient-checkpointing.")
    if learner.tiled_mlp and lora.lora_rank:
        raise ConfigError("--tiled-mlp", True, "does not go with --lora-rank", "Set one of them only.")
    check_optimizer(learner)
    if "reference" in learner.offload and not frozen:
        problem = "has no effect: the reference is the model with its adapter off" if lora.lora_rank else "has nothing to move"
        raise ConfigError("--offload", "reference", problem, "Leave it out: no reference model or teacher is loaded.")
    if "ema" in learner.offload and learner.ema_decay is None:
        raise ConfigError("--offload", "ema", "has nothing to move", "Add --ema-decay 0.99, or leave it out.")
    facts_of_backend(learner.learner_backend).check(learner, algo, lora)


def needing_gpus(learner: LearnerConfig) -> list[tuple[str, str]]:
    """Return the settings of a learner that need a GPU, each a flag with its value."""
    given = [("--deepspeed-args", name) for name in facts_of_backend(learner.learner_backend).on_gpu(learner)]
    given += [("--offload", " ".join(learner.offload))] if learner.offload else []
    flash = learner.attn_implementation.startswith("flash")
    return given + ([("--attn-implementation", learner.attn_implementation)] if flash else [])


def check_lora(config: TrainConfig) -> None:
    """Check the settings of adapters against each other and against the settings that they exclude.

    Raises:
        ConfigError: For the first setting that has no effect, or excludes another.
    """
    lora, publish = config.lora, config.weights.publish
    if not lora.lora_rank:
        refuse_set(config.weights, ("publish",), *UNUSED)
    elif config.algo.ref_reset_every:
        problem = "cannot be done with --lora-rank: the reference is the model without its adapter"
        raise ConfigError("--ref-reset-every", config.algo.ref_reset_every, problem, "Leave one of the two out.")
    elif lora.lora_dropout and config.algo.old_logprobs == "behaviour":
        problem = "needs the log-probabilities of the model as it is in the step, and the recorded ones are of the whole adapter"
        raise ConfigError("--lora-dropout", lora.lora_dropout, problem, "Leave out --old-logprobs behaviour.")
    elif publish == "adapter":
        _check_native(config)
        if config.learner.load_in_4bit:
            problem = "would leave the model in the engines whole, and the learner's in 4 bits"
            raise ConfigError("--publish", publish, problem, "Leave out --publish or --load-in-4bit.")
    check_adapter(config.learner, lora)


def check_adapter(learner: LearnerConfig, lora: LoraConfig) -> None:
    """Check the settings of adapters against those of the learner.

    Raises:
        ConfigError: For the first setting that has no effect, or excludes another, or if a package is missing.
    """
    if not lora.lora_rank:
        refuse_set(lora, (), *UNUSED)
        refuse_set(learner, ("load_in_4bit",), *UNUSED)
        return
    if not lora.target_names:
        raise ConfigError("--lora-target-modules", lora.lora_target_modules, "names no layer", f"Leave it out for {ALL_LINEAR}.")
    check_dora(lora, learner.zero_stage)
    if learner.load_in_4bit:
        check_divided_4bit(learner.zero_stage)
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ConfigError("--load-in-4bit", True, "needs bitsandbytes, which is not installed", "pip install 'agentrl[qlora]'")


UNUSED = "has no effect without an adapter", "Add --lora-rank 16, or leave it out."


def _check_native(config: TrainConfig) -> None:
    lora = config.lora
    if "dora" in lora.lora_variant:
        raise ConfigError("--lora-variant", "dora", "cannot be published as an adapter: vLLM takes none of DoRA", "Leave out --publish.")
    if config.run.ray_address:
        problem = "hands engines a directory in memory, which other machines do not see"
        raise ConfigError("--publish", config.weights.publish, problem, "Leave out --publish or --ray-address.")
    if lora.lora_rank > NATIVE_RANKS[-1]:
        raise ConfigError("--lora-rank", lora.lora_rank, f"is above {NATIVE_RANKS[-1]}, the most that vLLM takes", "Leave out --publish.")


def check_optimizer(settings: OptimizerSettings) -> None:
    """Check that an optimizer is installed and works with the other settings.

    Raises:
        ConfigError: If its package is missing, the ZeRO stage gives it parts of matrices, or a setting has no effect on it.
    """
    name = settings.optimizer
    facts = OPTIMIZERS[name]
    if facts.package and importlib.util.find_spec(facts.package) is None:
        raise ConfigError("--optimizer", name, f"needs {facts.package}, which is not installed", "pip install 'agentrl[qlora]'")
    check_flattened(name, settings.zero_stage)
    if not facts.betas and settings.adam_betas != BETAS:
        raise ConfigError("--adam-betas", settings.adam_betas, f"has no effect with --optimizer {name}", "Leave it out.")
