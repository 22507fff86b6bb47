"""Masks that any of the corrections may apply besides its own: drifted failures, and extreme tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algo.statistics import segment_count, segment_sum

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.algo.off_policy import CorrectionInputs


def opsm_keep(inputs: CorrectionInputs, delta: float) -> Tensor:
    """Off-policy sequence masking: which tokens stay (DeepSeek-V3.2, arXiv:2512.02556, section 3.1).

    Drops a sequence with a negative advantage whose mean ``behaviour - old`` exceeds `delta`: a failure that the
    present policy would hardly produce teaches it nothing and only adds noise.

    Args:
        inputs: The action tokens.
        delta: Bound of the drift, in nats per token.

    Returns:
        False for the negative tokens of such sequences. # [A] bool
    """
    # Against the policy that sampled: against the learner's own it would be 0 with one update per batch.
    drift = inputs.sequence_mean(inputs.behaviour - inputs.old)
    return ~((inputs.advantages < 0) & (drift > delta))


def m2po_keep(inputs: CorrectionInputs, tau: float) -> Tensor:
    """Return the tokens that are left when the largest ``|log rho|`` are dropped until the mean square is at most `tau`. # [A] bool."""
    # In float64: PyTorch would round the bound, a single number, to float32 to compare it with float32 numbers.
    return inputs.log_rho.abs().double() <= second_moment_threshold(inputs.log_rho, tau)


def second_moment_threshold(log_rho: Tensor, tau: float) -> Tensor:
    """Return the largest bound b for which tokens with ``|log rho| <= b`` have a mean squared log ratio of at most `tau`. # [A] -> [].

    M2PO (arXiv:2510.01161), for the log ratios of the whole batch. Found on a grid that is refined three times around the answer, to within
    1.2e-6; infinite if nothing needs to be masked.
    """
    import torch

    cells, size = 256, log_rho.abs().clamp(max=20.0).double()
    low, high = size.new_tensor(0.0), size.new_tensor(20.0)
    for _ in range(3):
        edges = low + (high - low) * torch.linspace(0.0, 1.0, cells + 1, dtype=size.dtype, device=size.device)
        cell = torch.bucketize(size, edges)
        counts, squares = segment_count(cell, cells + 2).double(), segment_sum(size.square(), cell, cells + 2)
        within = squares.cumsum(0) <= tau * counts.cumsum(0)
        if bool(within[:-1].all()):
            return torch.where(high == 20.0, size.new_tensor(float("inf")), high)
        first = int((~within[:-1]).nonzero()[0])
        low, high = edges[first - 1], edges[first]
    return low
