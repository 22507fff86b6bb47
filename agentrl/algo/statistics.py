"""Moving statistics from tensors to `MetricSums` with one transfer from the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from agentrl.core.metrics import HISTOGRAM_WIDTH, MetricSums


def record_means(stats: MetricSums, means: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Add ``name -> (sum, weight)``, each a scalar tensor."""
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
    bins, counts = torch.unique(torch.round(log_values.detach().double() / HISTOGRAM_WIDTH).long(), return_counts=True)
    stats.histogram(name, dict(zip(bins.tolist(), counts.tolist(), strict=True)))


def fraction(hit: Tensor, within: Tensor) -> tuple[Tensor, Tensor]:
    """``(number of tokens in both masks, number in `within`)``: a mean that stays exact when merged."""
    return (hit & within).sum(), within.sum()


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """``exp`` of a log ratio clamped to +-20, so that no token can overflow the loss."""
    return log_ratio.clamp(-20.0, 20.0).exp()
