"""Facts and rules of PyTorch alone as a back-end of the learner: one rank, in float32, with whole parameters."""

from __future__ import annotations

from agentrl.algo.plan import AlgoConfig
from agentrl.core.errors import ConfigError
from agentrl.core.settings import flag
from agentrl.learner.backends import BackendFacts, whole_states
from agentrl.learner.plan import LearnerConfig, LoraConfig

NEEDED = {
    "num_learners": 1,
    "zero_stage": 0,
    "deepspeed_args": (),
    "sequence_parallel": 1,
    "learner_tensor_parallel": 1,
    "tiled_mlp": False,
}
"""Settings for what only DeepSpeed does, and the values with which it does nothing."""


def check(learner: LearnerConfig, algo: AlgoConfig, lora: LoraConfig) -> None:
    """Refuse what only DeepSpeed does.

    Raises:
        ConfigError: For the first such setting.
    """
    del algo, lora
    for name, value in NEEDED.items():
        if (given := getattr(learner, name)) != value:
            raise ConfigError(flag(name), given, "needs DeepSpeed", f"Leave out --learner-backend torch, or {flag(name)}.")
    if "optimizer" in learner.offload:
        raise ConfigError("--offload", "optimizer", "needs DeepSpeed", "Leave out --learner-backend torch, or this.")
    if learner.learner_dtype == "bfloat16":
        problem = "needs DeepSpeed, which has float32 master weights; --learner-backend torch trains in float32"
        raise ConfigError("--learner-dtype", "bfloat16", problem, "Leave out one of the two.")


def states(size: int, learner: LearnerConfig, *, width: int, outside: int = 0) -> tuple[float, float, float]:
    """Return the bytes of parameters, gradients and optimizer of one trained model; see `agentrl.learner.backends.States`."""
    del width
    return whole_states(size, learner.optimizer, outside=outside)


FACTS = BackendFacts(check=check, states=states, divides=False, float32=True, defaults={"zero_stage": 0})
