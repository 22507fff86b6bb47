"""Settings of rewards that trained models give, and what the files of such a model say about it; nothing heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from agentrl.core.settings import Alias, Count, CountOrZero, NonNegative, Port, Positive

ANSWER = "answer:"
"""Specification of the environment that ends after one answer and leaves the reward to ``--reward-model``."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Rewards from trained models."""

    reward_model: Annotated[tuple[str, ...], Alias("--reward-pretrain")] = ()
    """Models that judge episodes, Hugging Face directories or hub names: sequence classifiers with one output, which score the whole
    episode, or process reward models, which score each turn. Their rewards are added to the environment's."""
    reward_model_weights: tuple[float, ...] = ()
    """Factor of each of ``--reward-model``, in their order. Empty: 1 for each."""
    environment_reward_weight: float = 1.0
    """Factor of the environment's own reward beside ``--reward-model``; with 0 it is only measured, as ``env/reward`` and as score."""
    value_head_prefix: str = ""
    """Name of the layer that makes the score, in the files of ``--reward-model``. Empty: ``score``, or what its ``config.json`` says."""
    normalize_reward: bool = False
    """Subtract the running mean of each model's scores and divide by their running standard deviation, over the steps trained so far."""
    reward_model_clip: Positive = 10.0
    """Scores of ``--reward-model`` are cut to this range around 0, after they are normalised and before they are weighted."""
    reward_model_max_tokens: CountOrZero = 0
    """Tokens that a reward model reads; of a longer episode the last ones. 0: the context length of the model."""
    process_reward_at: Literal["turn", "step"] = "turn"
    """Token at which the reward of a process reward model is paid: the last of the ``turn``, or the last of its worst ``step``, so that
    what comes after is not blamed for it."""
    reward_model_workers: Count = 1
    """Processes per reward model; the episodes are divided among them."""
    reward_model_gpus: NonNegative = 1.0
    """GPUs of each of these processes, or a share of one, as 0.25; without effect where there are none."""
    reward_model_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of a reward model's weights. ``auto``: float32 on CPU, bfloat16 on GPU."""

    @property
    def weights(self) -> tuple[float, ...]:
        """A factor for each model."""
        return self.reward_model_weights or (1.0,) * len(self.reward_model)

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each model, for metrics: the last part of its path, with a number where two are the same."""
        last = [Path(model).name or model for model in self.reward_model]
        return tuple(name if last.count(name) == 1 else f"{name}-{index}" for index, name in enumerate(last))


@dataclass(frozen=True, kw_only=True)
class PenaltyConfig:
    """Rewards of episodes that are too long."""

    overlong_buffer: Annotated[CountOrZero, Alias("--overlong-buffer-len")] = 0
    """Tokens before ``--max-new-tokens`` over which a turn's penalty for length grows to ``--overlong-penalty`` (DAPO); 0: no penalty."""
    overlong_penalty: Annotated[NonNegative, Alias("--overlong-penalty-factor")] = 1.0
    """Reward taken away from a turn that uses up all of ``--max-new-tokens``, if ``--overlong-buffer`` is set."""
    stop_properly_penalty: Annotated[float | None, Alias("--stop-properly-penalty-coef")] = None
    """For an episode cut by a token limit: at least 0 multiplies its reward, below 0 replaces it. Scores do not change."""

    @property
    def changes_rewards(self) -> bool:
        """True if one of the penalties is on."""
        return bool(self.overlong_buffer) or self.stop_properly_penalty is not None


@dataclass(frozen=True, kw_only=True)
class RewardServing:
    """One reward model, and how it is served over HTTP."""

    model: str = ""
    """A reward model: a Hugging Face directory or hub name, as ``agentrl reward-model`` writes it."""
    port: Port = 5000
    """Port to listen on. 0: a free one."""
    host: str = "127.0.0.1"
    """Address to listen on. Whoever reaches it may ask the model; there is no key."""
    batch_size: Count = 64
    """Texts that go through the model at once."""
    max_pending: Count = 1024
    """Texts that may wait; further requests are refused with 429 and ``Retry-After``."""
    max_tokens: CountOrZero = 0
    """Tokens that are read; of a longer text the last ones. 0: the context length of the model."""
    value_head_prefix: str = ""
    """Name of the layer that makes the score, in the model's files. Empty: ``score``, or what its ``config.json`` says."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights. ``auto``: float32 on CPU, bfloat16 on GPU."""
    trust_remote_code: bool = False
    """Allow the model's own Python code to run."""
