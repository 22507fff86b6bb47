"""Settings of a learner rank; frozen, picklable, and free of torch so that any process can build them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentrl.config.schema import AlgoConfig, LearnerConfig, TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """Settings of every rank of one learner.

    Attributes:
        model: Hugging Face directory or hub name of the initial policy.
        learner: DeepSpeed settings.
        algo: Algorithm settings.
        num_steps: Steps of the whole run, the length of the learning rate schedule.
        max_new_tokens: Tokens of a turn at most; the length in the aggregation ``constant``.
        seed: Seed of new layers.
        trust_remote_code: Allow the model's own Python code to run.
        device: Kind of device to train on.
    """

    model: str
    learner: LearnerConfig
    algo: AlgoConfig
    num_steps: int
    max_new_tokens: int
    seed: int = 0
    trust_remote_code: bool = False
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def bf16(self) -> bool:
        """True for training in bfloat16."""
        dtype = self.learner.learner_dtype
        return dtype == "bfloat16" or (dtype == "auto" and self.device == "cuda")


def settings_from(config: TrainConfig, *, model: str, device: Literal["cpu", "cuda"]) -> LearnerSettings:
    """Settings of the learner of a run.

    Args:
        config: The resolved configuration.
        model: Directory or hub name to load, with the bundled model already filled in.
        device: Kind of device the ranks run on.
    """
    return LearnerSettings(
        model=model,
        learner=config.learner,
        algo=config.algo,
        num_steps=config.run.num_steps,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=config.run.seed,
        trust_remote_code=config.model.trust_remote_code,
        device=device,
    )
