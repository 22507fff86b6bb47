"""Entropy of the policy, from the logits."""

from __future__ import annotations

import torch
from torch import Tensor


def entropy_from_logits(logits: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """``-sum p log p`` of the distribution the sampler draws from.

    Args:
        logits: Of each action token. # [A, vocabulary]
        temperature: What the sampler divides the logits by; a number or one per token. # [A]

    Returns:
        Entropy in nats, with gradient. # [A]
    """
    divisor = temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    log_p = torch.log_softmax(logits.float() / divisor, dim=-1)
    return -(log_p.exp() * log_p).sum(-1)
