"""Aggregation of token losses into one number.

The denominators are those of the whole optimizer step. Every micro-batch of every rank divides by the same numbers, so
the sum of the parts is the loss of the whole, however it was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from torch import Tensor

from agentrl.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Sizes of one optimizer step, summed over micro-batches and ranks.

    Attributes:
        tokens: Action tokens, masked ones included.
        episodes: Episodes; one with several branches counts once.
        constant: Tokens every episode is taken to have in the aggregation ``constant``.
    """

    tokens: float
    episodes: float
    constant: float


Weighting: TypeAlias = Callable[[Tensor, Denominators], Tensor | float]
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

    Raises:
        ConfigError: If the mode is unknown.
    """
    if mode not in AGGREGATIONS:
        raise ConfigError("--loss-aggregation", mode, "is not an aggregation", f"Choose one of {', '.join(AGGREGATIONS)}")
    return (per_token * AGGREGATIONS[mode](episode_length.to(per_token.dtype), denominators)).sum()
