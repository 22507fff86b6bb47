"""Sums, means and variances over action tokens and over the rows, episodes and groups that they belong to.

torch is imported in the functions that need it, so that estimators and losses can be listed without loading it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from agentrl.core.metrics import HISTOGRAM_WIDTH, MetricSums

if TYPE_CHECKING:
    from torch import Tensor


SAME = 1e-6
"""Difference of rewards, as a share of their size, that passes for rounding: float32 sums that should be equal differ by less."""


def segment_count(index: Tensor, size: int) -> Tensor:
    """Entries per segment. # [N] int64."""
    return index.bincount(minlength=size)


def segment_sum(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Sum of `values` per segment; 0 for an empty one. Differentiable. # [N]."""
    return values.new_zeros(size).index_add(0, index, values)


def segment_mean(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Mean of `values` per segment; 0 for an empty one. Differentiable. # [N]."""
    return segment_sum(values, index, size) / segment_count(index, size).clamp(min=1).to(values.dtype)


def segment_std(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Unbiased standard deviation per segment; 0 for a segment of fewer than two entries. # [N]."""
    deviation = values - segment_mean(values, index, size)[index]
    degrees = (segment_count(index, size) - 1).clamp(min=1).to(values.dtype)
    return (segment_sum(deviation.square(), index, size) / degrees).sqrt()


def reverse_discounted_cumsum(values: Tensor, index: Tensor, discount: float | Tensor = 1.0) -> Tensor:
    """Return ``y[t] = values[t] + discount * y[t + 1]`` within each segment, whose tokens are adjacent and in time order. # [A].

    A tensor has the discount of each segment, by its number in `index`.
    Computed by doubling the reach in each pass (``log2`` of the longest segment passes) rather than token by token.
    """
    import torch

    totals, reach = values.clone(), 1
    factor = discount if isinstance(discount, float | int) else discount[index]
    while reach < len(values):
        same = index[:-reach] == index[reach:]
        if not bool(same.any()):
            break
        ahead = torch.where(same, totals[reach:], torch.zeros_like(totals[reach:]))
        power = factor**reach if isinstance(factor, float | int) else factor[:-reach] ** reach
        totals = torch.cat([totals[:-reach] + power * ahead, totals[-reach:]])
        reach *= 2
    return totals


def segment_ends(index: Tensor) -> Tensor:
    """Mark the last entry of each segment; a segment's entries are adjacent. # [A] bool."""
    import torch

    ends = torch.ones_like(index, dtype=torch.bool)
    ends[:-1] = index[:-1] != index[1:]
    return ends


def next_in_segment(values: Tensor, index: Tensor) -> Tensor:
    """Value of the following token of the same segment, 0 at a segment's end. # [A]."""
    import torch

    shifted = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    return torch.where(segment_ends(index), torch.zeros_like(shifted), shifted)


def record_means(stats: MetricSums, means: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Add ``name -> (sum, weight)``, each a scalar tensor."""
    import torch

    # All numbers in one transfer, because each transfer from a GPU waits for it.
    flat = torch.stack([part.detach().double() for pair in means.values() for part in pair]).tolist()
    for position, name in enumerate(means):
        stats.mean(name, flat[2 * position], flat[2 * position + 1])


def record_extremes(stats: MetricSums, *, highs: Mapping[str, Tensor] | None = None, lows: Mapping[str, Tensor] | None = None) -> None:
    """Keep the largest and the smallest entry of each tensor; an empty tensor adds nothing."""
    for name, tensor in (highs or {}).items():
        if tensor.numel():
            stats.high(name, float(tensor.detach().max()))
    for name, tensor in (lows or {}).items():
        if tensor.numel():
            stats.low(name, float(tensor.detach().min()))


def record_percentile(stats: MetricSums, name: str, log_values: Tensor) -> None:
    """Count ``exp(log_values)`` into the histogram from which `MetricSums` takes the 99th percentile."""
    import torch

    bins, counts = torch.unique(torch.round(log_values.detach().double() / HISTOGRAM_WIDTH).long(), return_counts=True)
    stats.histogram(name, dict(zip(bins.tolist(), counts.tolist(), strict=True)))


def fraction(hit: Tensor, within: Tensor) -> tuple[Tensor, Tensor]:
    """``(number of tokens in both masks, number in `within`)``: a mean that stays exact when merged."""
    return (hit & within).sum(), within.sum()


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """``exp`` of a log ratio clamped to +-20, so that no token can overflow the loss."""
    return log_ratio.clamp(-20.0, 20.0).exp()
