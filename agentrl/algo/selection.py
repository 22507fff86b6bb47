"""Tokens of high entropy, selected once per step of the whole batch, so that they do not depend on its layout."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def high_entropy(entropies: Tensor, share: float) -> Tensor:
    """Mark the ``share`` of the tokens with the highest entropy, and those equal to the last of them (arXiv:2506.01939). # [A] -> [A] bool.

    The bound is the quantile ``1 - share`` of the batch.
    """
    import torch

    if not len(entropies):
        return torch.zeros_like(entropies, dtype=torch.bool)
    # A product that should be whole may be a little more, and would be rounded up to the next place.
    place = math.ceil((1.0 - share) * (len(entropies) - 1) - 1e-9)
    return entropies >= entropies.kthvalue(place + 1).values
