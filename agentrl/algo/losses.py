"""Policy losses: one registered pure function each, from typed inputs to a loss per action token.

Throughout, ``r = exp(clamp(new - old, +-20))``, ``low = 1 - eps_clip_low`` and ``high = 1 + eps_clip_high``. Correction
weights and aggregation come afterwards and are the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from agentrl.algo.statistics import bounded_exp, fraction, record_extremes, record_means, segment_mean
from agentrl.core.errors import BatchError, ConfigError
from agentrl.core.metrics import MetricSums


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueLossResult:
    """A value loss before aggregation.

    Attributes:
        per_token: To be minimised. # [A]
        stats: ``value/mean``, ``value/return_mean``, ``value/error`` (mean squared), ``value/clip_fraction``.
    """

    per_token: Tensor
    stats: MetricSums = field(default_factory=MetricSums)


def value_loss(new: Tensor, old: Tensor, returns: Tensor, value_clip: float | None) -> ValueLossResult:
    """``0.5 max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2)`` (arXiv:1707.06347, as in the authors' code).

    Args:
        new: Values of the critic being trained, with gradient. # [A]
        old: Values when the batch was taken. # [A]
        returns: Targets, from `gae`. # [A]
        value_clip: How far a value may move from `old`; `None` switches clipping off.

    Returns:
        The loss per action token.
    """
    free = (new - returns).square()
    worst = free
    if value_clip is not None:
        worst = torch.maximum(free, (old + (new - old).clamp(-value_clip, value_clip) - returns).square())
    with torch.no_grad():
        stats, count = MetricSums(), new.new_tensor(float(len(new)))
        record_means(
            stats,
            {
                "value/mean": (new.sum(), count),
                "value/return_mean": (returns.sum(), count),
                "value/error": (free.sum(), count),
                "value/clip_fraction": ((worst > free).sum(), count),
            },
        )
    return ValueLossResult(per_token=0.5 * worst, stats=stats)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """The action tokens of one micro-batch.

    Attributes:
        new: Log-probabilities under the weights being trained, with gradient. # [A]
        old: The same under the learner's weights when the batch was taken. # [A]
        advantages: As from `compute_advantages`. # [A]
        sequence: Row of each token, from 0; rows are never split between micro-batches. # [A] int64

    Raises:
        BatchError: If the lengths disagree.
    """

    new: Tensor
    old: Tensor
    advantages: Tensor
    sequence: Tensor

    def __post_init__(self) -> None:
        for name, tensor in {"old": self.old, "advantages": self.advantages, "sequence": self.sequence}.items():
            if tensor.shape != self.new.shape:
                raise BatchError(f"{name} has shape {tuple(tensor.shape)}, new {tuple(self.new.shape)}: one entry per action token")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """Settings of the losses, named as in the configuration.

    Attributes:
        eps_clip_low: The ratio is clipped below at 1 - this.
        eps_clip_high: The ratio is clipped above at 1 + this.
        dual_clip: For a negative advantage A the objective of `ppo` is at least this times A; `None` switches it off.
    """

    eps_clip_low: float = 0.2
    eps_clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        if self.dual_clip is not None and self.dual_clip <= 1.0:
            raise ConfigError("--dual-clip", self.dual_clip, "must be larger than 1", "Use 3, or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyLossResult:
    """A loss before correction and aggregation.

    Attributes:
        per_token: To be minimised. # [A]
        stats: ``policy/kl`` (k3 of new against old), ``policy/ratio_mean``, ``policy/ratio_max``, ``policy/ratio_min``,
            ``policy/clip_fraction`` and the same with ``_positive`` and ``_negative`` over the tokens whose advantage
            has that sign; with dual clip ``policy/dual_clip_fraction`` over the negative ones.
    """

    per_token: Tensor
    stats: MetricSums = field(default_factory=MetricSums)


PolicyLoss: TypeAlias = Callable[[LossInputs, LossOptions], PolicyLossResult]


def policy_loss(name: str, inputs: LossInputs, options: LossOptions) -> PolicyLossResult:
    """Run the loss called `name`.

    Raises:
        ConfigError: If the name is unknown.
    """
    if name not in POLICY_LOSSES:
        raise ConfigError("--policy-loss", name, "is not a policy loss", f"Choose one of {', '.join(POLICY_LOSSES)}")
    return POLICY_LOSSES[name](inputs, options)


def ppo(inputs: LossInputs, options: LossOptions) -> PolicyLossResult:
    """``-min(r A, clip(r, low, high) A)``, for A < 0 and dual clip c ``-max(that min, c A)``.

    PPO (arXiv:1707.06347), clip-higher (DAPO, arXiv:2503.14476), dual clip (arXiv:1912.09729).
    """
    ratio = bounded_exp(inputs.new - inputs.old)
    per_token = _clipped_objective(ratio, inputs.advantages, options)
    stats = _statistics(inputs, ratio, _ineffective(ratio, inputs.advantages, options))
    if options.dual_clip is not None:
        floor = -options.dual_clip * inputs.advantages
        negative = inputs.advantages < 0
        record_means(stats, {"policy/dual_clip_fraction": fraction(per_token.detach() > floor, negative)})
        per_token = torch.where(negative, torch.minimum(per_token, floor), per_token)
    return PolicyLossResult(per_token=per_token, stats=stats)


def gspo(inputs: LossInputs, options: LossOptions) -> PolicyLossResult:
    """PPO's clipped objective on one ratio per sequence, ``exp(mean over the sequence of (new - old))``.

    GSPO (arXiv:2507.18071), in its token form: the value of the ratio is the sequence's, its gradient the token's own.
    The gradient is that of GSPO wherever a sequence's tokens share one advantage. Meant for the aggregation
    ``seq-mean-token-mean`` and for clip ranges around 3e-4.
    """
    rows = int(inputs.sequence.max()) + 1 if inputs.sequence.numel() else 0
    mean = segment_mean((inputs.new - inputs.old).detach(), inputs.sequence, rows)[inputs.sequence]
    ratio = bounded_exp(mean + inputs.new - inputs.new.detach())
    clipped = _ineffective(ratio, inputs.advantages, options)
    return PolicyLossResult(per_token=_clipped_objective(ratio, inputs.advantages, options), stats=_statistics(inputs, ratio, clipped))


def cispo(inputs: LossInputs, options: LossOptions) -> PolicyLossResult:
    """``-stop_gradient(clip(r, low, high)) A new``: every token keeps a gradient (CISPO, arXiv:2506.13585)."""
    ratio = bounded_exp(inputs.new - inputs.old).detach()
    weight = ratio.clamp(1.0 - options.eps_clip_low, 1.0 + options.eps_clip_high)
    return PolicyLossResult(per_token=-weight * inputs.advantages * inputs.new, stats=_statistics(inputs, ratio, weight != ratio))


def reinforce(inputs: LossInputs, options: LossOptions) -> PolicyLossResult:
    """``-A new``, without a ratio: for exactly on-policy batches (Williams, 1992)."""
    del options
    ratio = bounded_exp(inputs.new - inputs.old).detach()
    return PolicyLossResult(
        per_token=-inputs.advantages * inputs.new, stats=_statistics(inputs, ratio, torch.zeros_like(ratio, dtype=torch.bool))
    )


POLICY_LOSSES: Mapping[str, PolicyLoss] = MappingProxyType({"ppo": ppo, "gspo": gspo, "cispo": cispo, "reinforce": reinforce})


def _clipped_objective(ratio: Tensor, advantages: Tensor, options: LossOptions) -> Tensor:
    clipped = ratio.clamp(1.0 - options.eps_clip_low, 1.0 + options.eps_clip_high)
    return torch.maximum(-ratio * advantages, -clipped * advantages)


def _ineffective(ratio: Tensor, advantages: Tensor, options: LossOptions) -> Tensor:
    """Tokens whose gradient the clip removes."""
    above = (ratio > 1.0 + options.eps_clip_high) & (advantages > 0)
    return above | ((ratio < 1.0 - options.eps_clip_low) & (advantages < 0))


@torch.no_grad()
def _statistics(inputs: LossInputs, ratio: Tensor, clipped: Tensor) -> MetricSums:
    stats = MetricSums()
    log_ratio = (inputs.new - inputs.old).clamp(-20.0, 20.0)
    every = torch.ones_like(clipped)
    record_means(
        stats,
        {
            "policy/kl": ((log_ratio.expm1() - log_ratio).sum(), every.sum()),
            "policy/ratio_mean": (ratio.sum(), every.sum()),
            "policy/clip_fraction": fraction(clipped, every),
            "policy/clip_fraction_positive": fraction(clipped, inputs.advantages > 0),
            "policy/clip_fraction_negative": fraction(clipped, inputs.advantages < 0),
        },
    )
    record_extremes(stats, highs={"policy/ratio_max": ratio}, lows={"policy/ratio_min": ratio})
    return stats
