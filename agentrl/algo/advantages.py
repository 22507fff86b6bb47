"""Advantage estimators: how rewards become one number per action token.

One registered pure function per estimator, all of the same type. Rules that hold for all of them:

* **Clipping.** The episode's total reward is clipped to ``reward_clip_range`` before anything else. Where turn rewards
  matter (`gae`, `reinforce`) the turn rewards of a clipped episode are all scaled by ``clipped / total``, so that they
  still sum to the clipped total and keep their signs and proportions. The range must therefore contain 0.
* **KL in the reward.** ``kl`` is subtracted token by token after the baseline: a token pays for the divergence of
  itself and of the tokens after it, never for those before it. Baselines and group standard deviations see rewards
  without KL.
* **Equal rewards.** A group whose rewards are all equal, or that has a single member, gets advantage 0 from
  `rloo`, `group_norm`, `dr_grpo` (and 0 before whitening from `reinforce_baseline`).
* **Ends.** An episode is over at its last action token, also when a budget cut it: nothing is bootstrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from agentrl.algo.statistics import (
    next_in_segment,
    reverse_discounted_cumsum,
    segment_count,
    segment_ends,
    segment_mean,
    segment_std,
    segment_sum,
)
from agentrl.core.errors import BatchError, ConfigError

Reduce: TypeAlias = Callable[[Tensor], Tensor]
"""Sums a tensor over data-parallel ranks; every rank calls it equally often."""


def identity(tensor: Tensor) -> Tensor:
    """The `Reduce` of a single rank."""
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdvantageInputs:
    """The action tokens of one batch, episode after episode, and what they earned.

    Attributes:
        token_rewards: Each turn's reward at the turn's last action token, 0 elsewhere; sums to `rewards`. # [A]
        episode: Episode of each token, non-decreasing; branches of an episode follow each other in time. # [A] int64
        group: Group of each episode; whole groups are on one rank. # [E] int64
        rewards: Total reward of each episode, not clipped. # [E]
        values: The critic's values, for `gae`. # [A]
        kl: Penalty to subtract, already multiplied by its coefficient; `None` if KL is not in the reward. # [A]

    Raises:
        BatchError: If the lengths disagree.
    """

    token_rewards: Tensor
    episode: Tensor
    group: Tensor
    rewards: Tensor
    values: Tensor | None = None
    kl: Tensor | None = None

    def __post_init__(self) -> None:
        per_token = {"episode": self.episode, "values": self.values, "kl": self.kl}
        for name, tensor in per_token.items():
            if tensor is not None and tensor.shape != self.token_rewards.shape:
                raise BatchError(
                    f"{name} has shape {tuple(tensor.shape)}, token_rewards {tuple(self.token_rewards.shape)}: one entry per action token"
                )
        if self.group.shape != self.rewards.shape:
            raise BatchError(f"group has shape {tuple(self.group.shape)}, rewards {tuple(self.rewards.shape)}: one entry per episode")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageOptions:
    """Settings of the estimators, named as in the configuration.

    Attributes:
        gamma: Discount per action token; the estimators in `UNDISCOUNTED` take 1.
        gae_lambda: GAE's lambda.
        advantage_std_norm: Divide by the standard deviation where the estimator whitens or normalises.
        reward_clip_range: Bounds of an episode's reward; contains 0.

    Raises:
        ConfigError: If the range does not contain 0.
    """

    gamma: float = 1.0
    gae_lambda: float = 1.0
    advantage_std_norm: bool = True
    reward_clip_range: tuple[float, float] = (-10.0, 10.0)

    def __post_init__(self) -> None:
        low, high = self.reward_clip_range
        if not low <= 0.0 <= high:
            raise ConfigError(
                "--reward-clip-range", self.reward_clip_range, "must contain 0", "Give a lower bound <= 0 and an upper bound >= 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advantages:
    """What the policy and the critic are trained on.

    Attributes:
        advantages: One per action token. # [A]
        returns: Targets of the critic, only from `gae`. # [A]
    """

    advantages: Tensor
    returns: Tensor | None = None


Estimator: TypeAlias = Callable[[AdvantageInputs, AdvantageOptions, Reduce], Advantages]


@torch.no_grad()
def compute_advantages(name: str, inputs: AdvantageInputs, options: AdvantageOptions, reduce: Reduce = identity) -> Advantages:
    """Run the estimator called `name`.

    Args:
        name: A key of `ESTIMATORS`.
        inputs: The batch; on several ranks, this rank's whole groups.
        options: Settings.
        reduce: Sums over ranks; used by whitening only.

    Raises:
        ConfigError: If the name is unknown, `gae` has no values, or an estimator without a discount is given one.
    """
    if name not in ESTIMATORS:
        raise ConfigError("--advantage-estimator", name, "is not an estimator", f"Choose one of {', '.join(ESTIMATORS)}")
    if name in UNDISCOUNTED and options.gamma != 1.0:
        raise ConfigError("--gamma", options.gamma, f"the estimator {name!r} has no discount", "Use --gamma 1")
    return ESTIMATORS[name](inputs, options, reduce)


def whiten(values: Tensor, *, std_norm: bool = True, reduce: Reduce = identity) -> Tensor:
    """Subtract the mean over all tokens of all ranks and divide by their biased standard deviation.

    Args:
        values: This rank's tokens. # [A]
        std_norm: Whether to divide.
        reduce: Sums over ranks.

    Returns:
        ``(values - mean) / sqrt(max(variance, 1e-8))``. # [A]
    """
    exact = values.double()
    total, count = reduce(torch.stack([exact.sum(), exact.new_tensor(float(len(values)))])).unbind()
    centred = exact - total / count.clamp(min=1.0)
    if std_norm:
        variance = reduce(centred.square().sum()) / count.clamp(min=1.0)
        centred = centred * variance.clamp(min=1e-8).rsqrt()
    return centred.to(values.dtype)


def gae(inputs: AdvantageInputs, options: AdvantageOptions, reduce: Reduce = identity) -> Advantages:
    """Generalised advantage estimation over the action tokens of an episode, whitened (arXiv:1506.02438).

    ``d[t] = r[t] + gamma V[t+1] - V[t]``, ``A[t] = d[t] + gamma lambda A[t+1]``, ``returns = A + V`` before whitening.
    """
    if inputs.values is None:
        raise ConfigError("--advantage-estimator", "gae", "needs the values of a critic", "Train with a critic or choose another estimator")
    upcoming = next_in_segment(inputs.values, inputs.episode)
    deltas = _token_rewards(inputs, options) + options.gamma * upcoming - inputs.values
    advantages = reverse_discounted_cumsum(deltas, inputs.episode, options.gamma * options.gae_lambda)
    return Advantages(
        advantages=whiten(advantages, std_norm=options.advantage_std_norm, reduce=reduce),
        returns=advantages + inputs.values,
    )


def reinforce(inputs: AdvantageInputs, options: AdvantageOptions, reduce: Reduce = identity) -> Advantages:
    """Discounted sum of the token rewards from each token on, whitened: REINFORCE++ (arXiv:2501.03262)."""
    returns = reverse_discounted_cumsum(_token_rewards(inputs, options), inputs.episode, options.gamma)
    return Advantages(advantages=whiten(returns, std_norm=options.advantage_std_norm, reduce=reduce))


def reinforce_baseline(inputs: AdvantageInputs, options: AdvantageOptions, reduce: Reduce = identity) -> Advantages:
    """``r[i] - mean(r)`` of the group, earned at the episode's end, then as `reinforce` (arXiv:2501.03262, -baseline)."""
    rewards, group, groups = _episodes(inputs, options)
    excess = (rewards - segment_mean(rewards, group, groups)[group]).to(inputs.token_rewards.dtype)
    earned = torch.where(segment_ends(inputs.episode), excess[inputs.episode], torch.zeros_like(inputs.token_rewards))
    returns = reverse_discounted_cumsum(earned if inputs.kl is None else earned - inputs.kl, inputs.episode, options.gamma)
    return Advantages(advantages=whiten(returns, std_norm=options.advantage_std_norm, reduce=reduce))


def rloo(inputs: AdvantageInputs, options: AdvantageOptions, reduce: Reduce = identity) -> Advantages:
    """``r[i]`` minus the mean of the other members, ``(n r[i] - sum r) / (n - 1)`` (arXiv:2402.14740)."""
    del reduce
    rewards, group, groups = _episodes(inputs, options)
    members = segment_count(group, groups)[group].to(rewards.dtype)
    excess = members * rewards - segment_sum(rewards, group, groups)[group]
    return Advantages(advantages=_over_tokens(excess / (members - 1.0).clamp(min=1.0), inputs))


def group_norm(inputs: AdvantageInputs, options: AdvantageOptions, reduce: Reduce = identity) -> Advantages:
    """``(r[i] - mean(r)) / (std(r) + 1e-9)`` with the group's unbiased standard deviation: GRPO (arXiv:2402.03300)."""
    del reduce
    rewards, group, groups = _episodes(inputs, options)
    centred = rewards - segment_mean(rewards, group, groups)[group]
    if options.advantage_std_norm:
        centred = centred / (segment_std(rewards, group, groups)[group] + 1e-9)
    return Advantages(advantages=_over_tokens(centred, inputs))


def dr_grpo(inputs: AdvantageInputs, options: AdvantageOptions, reduce: Reduce = identity) -> Advantages:
    """``r[i] - mean(r)`` of the group; meant for the loss aggregation ``constant``: Dr. GRPO (arXiv:2503.20783)."""
    del reduce
    rewards, group, groups = _episodes(inputs, options)
    return Advantages(advantages=_over_tokens(rewards - segment_mean(rewards, group, groups)[group], inputs))


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        "gae": gae,
        "reinforce": reinforce,
        "reinforce_baseline": reinforce_baseline,
        "rloo": rloo,
        "group_norm": group_norm,
        "grpo": group_norm,
        "dr_grpo": dr_grpo,
    }
)
UNDISCOUNTED = frozenset({"rloo", "group_norm", "grpo", "dr_grpo"})
"""Estimators that give every token of an episode the same number."""


def _token_rewards(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """Token rewards of clipped episodes, minus KL. # [A]."""
    low, high = options.reward_clip_range
    clipped = inputs.rewards.clamp(low, high)
    scale = torch.where(clipped == inputs.rewards, torch.ones_like(clipped), clipped / inputs.rewards)
    rewards = inputs.token_rewards * scale[inputs.episode].to(inputs.token_rewards.dtype)
    return rewards if inputs.kl is None else rewards - inputs.kl


def _episodes(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor, int]:
    """Clipped rewards of the episodes, their dense group index and the number of groups. # [E], [E], N.

    In float64: in float32 the rounding of a mean of equal rewards is as large as the 1e-9 that guards the division.
    """
    low, high = options.reward_clip_range
    dense, group = torch.unique(inputs.group, return_inverse=True)
    return inputs.rewards.double().clamp(low, high), group, len(dense)


def _over_tokens(per_episode: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Give every token its episode's number, minus the KL from the token on. # [A]."""
    spread = per_episode.to(inputs.token_rewards.dtype)[inputs.episode]
    return spread if inputs.kl is None else spread - reverse_discounted_cumsum(inputs.kl, inputs.episode)
