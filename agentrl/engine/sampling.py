"""Sampling of tokens from logits, each row by a number of its own, so that it does not depend on the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.core.types import Sampling

CHUNK = 4_000_000
"""Entries of logits that are looked at at once."""


def sample(logits: Tensor, settings: Sequence[Sampling], draws: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return a token of each row and its log-probability under the tempered, cut distribution.

    Args:
        logits: Logits # [B, V], float32.
        settings: Of each row; temperature 0 takes the most likely token.
        draws: A number from [0, 1) for each row, which picks the token.
    """
    rows = max(1, CHUNK // logits.shape[1])
    tokens: list[int] = []
    logprobs: list[float] = []
    for first in range(0, len(logits), rows):
        last = first + rows
        found = _sample(logits[first:last], settings[first:last], draws[first:last])
        tokens += found[0].tolist()
        logprobs += found[1].tolist()
    return tokens, logprobs


def _sample(logits: Tensor, settings: Sequence[Sampling], draws: Sequence[float]) -> tuple[Tensor, Tensor]:
    temperatures = torch.tensor([each.temperature or 1.0 for each in settings], device=logits.device)
    logits = _cut(logits / temperatures[:, None], settings)
    logprobs = logits.log_softmax(-1)
    # In float64, because float32 rounds rare tokens away in a sum near 1. A draw of each row's own picks its token, not
    # `torch.multinomial`, whose generator all rows would share.
    mass = logprobs.double().exp().cumsum(-1)
    wanted = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None] * mass[:, -1:]
    # To the right of equal sums, so that a draw of 0 passes over tokens without mass.
    picked = torch.searchsorted(mass, wanted, right=True).clamp(max=logits.shape[1] - 1)
    greedy = torch.tensor([each.temperature == 0 for each in settings], device=logits.device)[:, None]
    picked = torch.where(greedy, logits.argmax(-1, keepdim=True), picked)
    return picked[:, 0], logprobs.gather(-1, picked)[:, 0]


def _cut(logits: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Leave the `top_k` most likely tokens, and of those the most likely with `top_p` of the mass together."""
    for row, each in enumerate(settings):
        if 0 < each.top_k < logits.shape[1]:
            least = logits[row].topk(each.top_k).values[-1]
            logits[row] = logits[row].masked_fill(logits[row] < least, float("-inf"))
        if each.top_p < 1.0:
            ordered, places = logits[row].sort()
            below = ordered.softmax(-1).cumsum(-1) <= 1 - each.top_p
            # The most likely token stays, whatever `top_p` is.
            below[-1] = False
            logits[row, places[below]] = float("-inf")
    return logits
