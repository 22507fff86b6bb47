"""Load balancing of a mixture of experts, exact over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def routing_load(router_logits: Sequence[Tensor], real: Tensor, top_k: int) -> Tensor:
    """How the router spread the tokens of a micro-batch, summed over layers.

    Args:
        router_logits: One tensor per layer. # each [B * L, experts]
        real: Which places of the flattened micro-batch are not padding. # [B * L] bool
        top_k: Experts per token.

    Returns:
        How often each expert was chosen, and the sum of its probabilities, the latter with gradient. # [2, experts]
    """
    probabilities = torch.cat([logits[real] for logits in router_logits]).float().softmax(-1)
    chosen = probabilities.topk(top_k, dim=-1).indices.flatten()
    counts = torch.bincount(chosen, minlength=probabilities.shape[-1])
    return torch.stack([counts.to(probabilities.dtype), probabilities.sum(0)])


def balance_share(probability: Tensor, chosen: Tensor, top_k: int) -> Tensor:
    """This micro-batch's share of the load-balancing loss of an update (Switch Transformers, arXiv:2101.03961).

    ``experts * sum_e f_e P_e`` with f_e the share of tokens sent to expert e and P_e its mean probability, over all
    layers and tokens of the update. Only P_e has a gradient, so with f_e known the loss is a sum over tokens.

    Args:
        probability: Sum of each expert's probabilities in this micro-batch. # [experts]
        chosen: How often each expert was chosen in the whole update. # [experts]
        top_k: Experts per token.

    Returns:
        A scalar; the sum over micro-batches and ranks is the loss.
    """
    entries = chosen.sum() / top_k
    return len(chosen) * (chosen / entries * probability / entries).sum()
