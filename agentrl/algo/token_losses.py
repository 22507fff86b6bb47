"""Losses of the policy and the critic: from action tokens to a loss for each of them, and from those to one number.

What the losses of the policy are given and return stands here, and the losses themselves in `agentrl.algo.losses`. torch is
imported when a loss is computed, so that a configuration can be checked without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from agentrl.algo.options import NoOptions
from agentrl.algo.statistics import bounded_exp, record_means, segment_mean
from agentrl.core.errors import BatchError, ConfigError
from agentrl.core.metrics import MetricSums
from agentrl.core.settings import Positive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossResult:
    """A loss before correction and aggregation, and its statistics."""

    per_token: Tensor  # [A]: to be minimised
    stats: MetricSums  # metrics of these tokens
    ratio: Tensor | None = None  # [A]: the ratio that a loss of the policy uses
    clipped: Tensor | None = None  # [A] bool: tokens whose gradient a loss of the policy removes or bounds; `None` stands for none


def value_loss(new: Tensor, old: Tensor, returns: Tensor, value_clip: float | None) -> LossResult:
    """``0.5 max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2)`` (arXiv:1707.06347, as in the authors' code).

    Args:
        new: Values of the critic being trained, with gradient. # [A]
        old: Values when the batch was taken. # [A]
        returns: Targets, from the estimator. # [A]
        value_clip: How far a value may move from `old`; `None` switches clipping off.

    Returns:
        The loss per action token, with ``value/mean``, ``value/return_mean``, ``value/error`` (mean squared) and
        ``value/clip_fraction``.
    """
    free = (new - returns).square()
    worst = free
    if value_clip is not None:
        worst = free.maximum((old + (new - old).clamp(-value_clip, value_clip) - returns).square())
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
    return LossResult(per_token=0.5 * worst, stats=stats)


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Options of a loss that bounds how far the policy moves from the one that the batch was taken with."""

    eps_clip_low: Positive = 0.2
    """The ratio is clipped below at 1 - this; for other losses than ``ppo``, their lower bound."""
    eps_clip_high: Positive = 0.2
    """The ratio is clipped above at 1 + this; larger than ``--eps-clip-low`` is clip-higher (DAPO)."""


def clip_options(clip: tuple[float, float] | None) -> type[Any]:
    """Return `LossOptions` with these defaults of the bounds, or no options if there are no bounds."""
    if clip is None:
        return NoOptions
    bounds = [("eps_clip_low", Positive, clip[0]), ("eps_clip_high", Positive, clip[1])]
    return LossOptions if clip == (0.2, 0.2) else make_dataclass("LossOptions", bounds, bases=(LossOptions,), frozen=True, kw_only=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """The action tokens of one micro-batch.

    Attributes:
        new: Log-probabilities under the weights being trained, with gradient. # [A]
        old: The same under the learner's weights when the batch was taken. # [A]
        advantages: As from `compute_advantages`. # [A]
        sequence: Row of each token, from 0; rows are never split between micro-batches. # [A] int64
        selected: Tokens that the function stated as ``selects`` marked in the whole batch; `None` if the loss states none. # [A] bool
        seed: Seed of random choices; another in every step.

    Raises:
        BatchError: If the lengths disagree.
    """

    new: Tensor
    old: Tensor
    advantages: Tensor
    sequence: Tensor
    selected: Tensor | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        tensors = {"old": self.old, "advantages": self.advantages, "sequence": self.sequence, "selected": self.selected}
        for name, tensor in tensors.items():
            if tensor is not None and tensor.shape != self.new.shape:
                raise BatchError(f"{name} has shape {tuple(tensor.shape)}, new {tuple(self.new.shape)}: one entry per action token")

    def ratio(self) -> Tensor:
        """Return the ratio of new to old policy, its logarithm clamped to +-20; with gradient. # [A]."""
        return bounded_exp(self.new - self.old)

    def sequence_mean(self, per_token: Tensor) -> Tensor:
        """Give every token the mean over its row. # [A] -> [A]."""
        rows = int(self.sequence.max()) + 1 if self.sequence.numel() else 0
        return segment_mean(per_token, self.sequence, rows)[self.sequence]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLosses:
    """The loss of every action token, with what is reported about it.

    Attributes:
        per_token: To be minimised. # [A]
        ratio: The ratio that the loss uses, for ``policy/ratio_mean`` and the like; unset: that of new to old policy. # [A]
        clipped: Tokens whose gradient the loss removes or bounds, for ``policy/clip_fraction``; unset: none. # [A] bool
        metrics: Numbers of some of the tokens by name, or of all; their mean is reported as ``policy/<name>``. # [any]
    """

    per_token: Tensor
    ratio: Tensor | None = None
    clipped: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


PolicyLoss: TypeAlias = "Callable[[LossInputs, Any], Tensor | TokenLosses]"
"""From the inputs and the loss's own options to losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Sizes of one optimizer step, summed over micro-batches and ranks.

    Every micro-batch of every rank divides by the same numbers, so the sum of the parts is the loss of the whole, however it was cut.
    """

    tokens: float  # action tokens, masked ones included
    episodes: float  # episodes; one with several branches counts once
    constant: float  # tokens every episode is taken to have in the aggregation ``constant``


Weighting: TypeAlias = "Callable[[Tensor, Denominators], Tensor | float]"
"""From the length of each token's episode # [A] and the denominators to each token's weight in the loss."""

AGGREGATIONS: Mapping[str, Weighting] = MappingProxyType(
    {
        "token-mean": lambda _, sizes: 1.0 / max(sizes.tokens, 1.0),
        "seq-mean-token-mean": lambda length, sizes: 1.0 / (length * max(sizes.episodes, 1.0)),
        "seq-mean-token-sum": lambda _, sizes: 1.0 / max(sizes.episodes, 1.0),
        "constant": lambda _, sizes: 1.0 / (max(sizes.episodes, 1.0) * sizes.constant),
    }
)


def aggregate(per_token: Tensor, *, episode_length: Tensor, mode: str, denominators: Denominators) -> Tensor:
    """Return the share of this micro-batch in the loss of the whole optimizer step.

    ``token-mean`` weights tokens equally, ``seq-mean-token-mean`` episodes equally, ``seq-mean-token-sum`` is the mean
    over episodes of their sums, ``constant`` divides that by a fixed length (Dr. GRPO, arXiv:2503.20783).

    Args:
        per_token: Loss of each action token, 0 where masked. # [A]
        episode_length: Action tokens of the token's episode, over all its branches. # [A]
        mode: A key of `AGGREGATIONS`.
        denominators: Sizes of the whole optimizer step.

    Returns:
        A scalar; the sum over micro-batches and ranks is the loss. 0, with a gradient, for an empty micro-batch.
    """
    return shares(per_token, episode_length=episode_length, mode=mode, denominators=denominators).sum()


def shares(per_token: Tensor, *, episode_length: Tensor, mode: str, denominators: Denominators) -> Tensor:
    """Return the share of each token in the loss of the whole optimizer step; see `aggregate`, which sums them. # [A]."""
    if mode not in AGGREGATIONS:
        raise ConfigError("--loss-aggregation", mode, "is not an aggregation", f"Choose one of {', '.join(AGGREGATIONS)}")
    return per_token * AGGREGATIONS[mode](episode_length.to(per_token.dtype), denominators)
