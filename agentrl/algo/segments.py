"""Sums over runs of a flat tensor: values ``# [A]`` with an index ``# [A]`` into N segments.

The result for one segment never depends on the other segments, so nothing changes when episodes are reordered, packed
or spread over ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def segment_count(index: Tensor, size: int) -> Tensor:
    """Entries per segment. # [N] int64."""
    return torch.bincount(index, minlength=size)


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


def reverse_discounted_cumsum(values: Tensor, index: Tensor, discount: float = 1.0) -> Tensor:
    """``y[t] = values[t] + discount * y[t + 1]`` within each segment.

    Computed by doubling the reach in each pass (``log2`` of the longest segment passes) rather than token by token.

    Args:
        values: One number per token. # [A]
        index: Segment of each token; a segment's tokens are adjacent and in time order. # [A]
        discount: Factor per token.

    Returns:
        Discounted sum from each token to the end of its segment. # [A]
    """
    totals, reach = values.clone(), 1
    while reach < len(values):
        same = index[:-reach] == index[reach:]
        if not bool(same.any()):
            break
        ahead = torch.where(same, totals[reach:], torch.zeros_like(totals[reach:]))
        totals = torch.cat([totals[:-reach] + discount**reach * ahead, totals[-reach:]])
        reach *= 2
    return totals


def segment_ends(index: Tensor) -> Tensor:
    """Whether an entry is the last of its segment; a segment's entries are adjacent. # [A] bool."""
    ends = torch.ones_like(index, dtype=torch.bool)
    ends[:-1] = index[:-1] != index[1:]
    return ends


def next_in_segment(values: Tensor, index: Tensor) -> Tensor:
    """The value of the following token of the same segment, 0 at a segment's end. # [A]."""
    shifted = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    return torch.where(segment_ends(index), torch.zeros_like(shifted), shifted)
