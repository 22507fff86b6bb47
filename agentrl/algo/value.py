"""The critic's loss."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl.algo.statistics import record_means
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
