"""Which rows go through the model as one sequence, because they begin with the same prompt.

The members of a group answer the same prompt. Kept once, with every answer attending to it and to itself but not to the
other answers, it gives each answer the log-probabilities that it has alone, and the prompt is computed once instead of
once for every member.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from agentrl.learner.batch import Batch
from agentrl.learner.layout import Bundle, Layout, MicroBatch

PROBE_WIDTH = 1024
"""Width of a model for which sharing six tokens is worth it."""

ROUNDING = 0.25
"""Difference that passes for rounding, as a share of that without a mask; about 1 if a model ignores the mask."""


@dataclass(slots=True)
class _Open:
    rows: list[int]
    length: int


def alone(batch: Batch) -> list[Bundle]:
    """Every row as a sequence of its own."""
    return [
        Bundle(rows=(row,), prompt=0, length=length, group=group)
        for row, (length, group) in enumerate(zip(batch.input_lengths().tolist(), batch.row_group().tolist(), strict=True))
    ]


def share_prompts(batch: Batch, *, budget: int, hidden_size: int) -> list[Bundle]:
    """Rows of a group that begin with the same tokens, up to their first action token, in one sequence where that is less work.

    Args:
        batch: The batch, on the CPU.
        budget: Tokens that a sequence of several rows may have.
        hidden_size: Width of the model, which decides how much attention weighs against everything else.

    Returns:
        Bundles in the order of their first rows; each row is in exactly one.
    """
    prompts, starts = batch.first_actions().tolist(), batch.offsets.tolist()
    tokens = batch.tokens.numpy()
    made: list[tuple[_Open, int, int]] = []
    growing: dict[tuple[int, bytes], _Open] = {}
    for single in alone(batch):
        (row,) = single.rows
        prompt = prompts[row]
        key = single.group, tokens[starts[row] : starts[row] + prompt].tobytes()
        bundle = growing.get(key)
        if bundle is not None and _worth_it(bundle.length, single.length - prompt, single.length, budget, hidden_size):
            bundle.rows.append(row)
            bundle.length += single.length - prompt
        else:
            growing[key] = _Open([row], single.length)
            made.append((growing[key], prompt, single.group))
    return [
        Bundle(rows=tuple(bundle.rows), prompt=prompt if len(bundle.rows) > 1 else 0, length=bundle.length, group=group)
        for bundle, prompt, group in made
    ]


def _worth_it(so_far: int, suffix: int, whole: int, budget: int, hidden_size: int) -> bool:
    """Whether a sequence of `so_far` tokens takes a row's `suffix` with less work than the `whole` row is alone.

    In multiplications of a layer, over its width: 12 times the width for a token's projections; for attention 2 for every
    pair of tokens where a mask is needed, and half of them where it is plainly causal.
    """
    longer = so_far + suffix
    shared = 12 * hidden_size * suffix + 2 * (longer**2 - so_far**2)
    return longer <= budget and shared <= 12 * hidden_size * whole + whole**2


def can_share(score: Callable[[MicroBatch], Tensor], config: Any, device: torch.device) -> bool:
    """Whether a model gives rows that share a prompt what it gives them alone; tried out on the model itself.

    Args:
        score: The model's log-probabilities of a micro-batch's action tokens.
        config: The model's configuration.
        device: Where the model is.

    Returns:
        Not with a window of attention (rows longer than it would see too much), with layers that carry a state from token to
        token, or with positions that do not come from ``position_ids``.
    """
    if not _attends_to_everything(config):
        return False
    batch = _probe(config.get_text_config().vocab_size)
    layout = Layout(batch)
    apart = layout.micro_batch(alone(batch), packed=False).to(device)
    together = layout.micro_batch(share_prompts(batch, budget=batch.num_tokens, hidden_size=PROBE_WIDTH), packed=False).to(device)
    with torch.no_grad():
        try:
            found = score(together)
        except (TypeError, ValueError, RuntimeError, IndexError):  # a model that takes no such mask says so in one of many ways
            return False
        expected, mixed_up = score(apart), score(replace(together, attention_mask=None, position_ids=None))
    # Rows and their action tokens are in the same order each time, because all rows are of one group with one prompt.
    return bool((found - expected).abs().mean() < ROUNDING * (mixed_up - expected).abs().mean())


def _probe(vocabulary: int) -> Batch:
    """Three rows of one group that begin with the same six tokens and go on with others."""
    prompt = torch.arange(6)
    rows = [torch.cat([prompt, 6 + torch.arange(length) * (number + 2)]) * 7 % vocabulary for number, length in enumerate((3, 5, 4))]
    offsets = torch.tensor([0, *itertools.accumulate(map(len, rows))])
    row = torch.cat([torch.full((len(tokens) - len(prompt),), number) for number, tokens in enumerate(rows)])
    place = torch.cat([torch.arange(len(prompt), len(tokens)) for tokens in rows])
    ones, zeros = torch.ones(len(row)), torch.zeros(len(rows))
    return Batch(
        tokens=torch.cat(rows),
        offsets=offsets,
        position=offsets[row] + place,
        row=row,
        episode=row,
        group=zeros.to(torch.int64),
        logprobs=ones,
        versions=row,
        temperature=ones,
        token_rewards=ones,
        rewards=zeros,
    )


def _attends_to_everything(config: Any) -> bool:
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return all(kind == "full_attention" for kind in kinds)
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    return window is None and getattr(text, "attention_chunk_size", None) is None
