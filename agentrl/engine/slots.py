"""Keys and values of many sequences for transformers' models: one slot each, attention over slots, and its independence of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentrl.weights.rows import RowInvariantLinear, fewest_rows

NAME = "agentrl_slots"
"""Name of the attention under which transformers calls `attend`."""
KEYS = 64
"""The number of keys is a multiple of it, so that sums over them are made in the same order in any company."""
QUERIES = 256
"""Tokens of a prompt whose attention is computed at once."""


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens of one forward pass: the next ones of each row, filled up at its end to as many as the row with most has."""

    rows: Tensor  # [B] slots
    starts: Tensor  # [B] place of the first new token in its sequence
    counts: Tensor  # [B] new tokens
    count: int  # the largest of them
    keys: int  # keys to attend to, at least all of the longest row
    offsets: Tensor | None = None  # [axes, B, count] position of each token less its place, where images are before it
    blocks: Tensor | None = None  # [B, keys] number of the block of tokens that attend to each other in both directions, -1 for none
    in_windows: bool = False  # layers without a window know no such blocks

    def to(self, device: torch.device) -> Step:
        """Return the same on a device."""
        offsets, blocks = (None if part is None else part.to(device) for part in (self.offsets, self.blocks))
        return Step(
            self.rows.to(device), self.starts.to(device), self.counts.to(device), self.count, self.keys, offsets, blocks, self.in_windows
        )

    def places(self) -> Tensor:
        """Places of the tokens in their sequences # [B, count]; what a row is filled up with has that of its last token."""
        tokens = torch.arange(self.count, device=self.starts.device)
        return self.starts[:, None] + torch.minimum(tokens, self.counts[:, None] - 1)

    def positions(self) -> Tensor:
        """Positions of the tokens for the rotary embedding # [B, count], or # [axes, B, count] with images that have several."""
        return self.places() if self.offsets is None else self.places() + self.offsets


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of each layer # [slots, heads, capacity, head size]; made when a layer first writes."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        self.step: Step
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens of the step # [B, heads, count, head size], and return what its rows attend to."""
        if layer_idx not in self._layers:
            # Zeros, because places that no token has filled are read and masked, and 0 times what memory holds may be NaN.
            made = [states.new_zeros(self.slots, states.shape[1], self.capacity, states.shape[3]) for states in (key_states, value_states)]
            self._layers[layer_idx] = made[0], made[1]
        return self._write(self._layers[layer_idx][0], key_states), self._write(self._layers[layer_idx][1], value_states)

    def _write(self, stored: Tensor, states: Tensor) -> Tensor:
        step = self.step
        # A single row needs no copy: its slot is read in place.
        if len(step.rows) == 1:
            row, start = int(step.rows[0]), int(step.starts[0])
            stored[row, :, start : start + step.count] = states[0]
            return stored[row : row + 1, :, : step.keys]
        if step.count == 1:
            stored[step.rows, :, step.starts] = states[:, :, 0]
        else:
            # The new tokens alone: what fills a row up could lie behind the end of its slot.
            rows, tokens = (torch.arange(step.count, device=states.device) < step.counts[:, None]).nonzero(as_tuple=True)
            stored[step.rows[rows], :, step.starts[rows] + tokens] = states[rows, :, tokens]
        return stored.index_select(0, step.rows)[:, :, : step.keys]  # whole slots: a plain copy is faster than a gather of parts

    def copy(self, source: int, targets: list[int], tokens: int) -> None:
        """Give `targets` the first tokens of `source`."""
        for pair in self._layers.values():
            for stored in pair:
                stored[targets, :, :tokens] = stored[source, :, :tokens]

    def resized(self, slots: int, capacity: int, moves: dict[int, int]) -> SlotCache:
        """Return a cache of another size with some slots moved there, from -> to."""
        new = SlotCache(slots, capacity)
        for layer, pair in self._layers.items():
            made = [stored.new_zeros(slots, stored.shape[1], capacity, stored.shape[3]) for stored in pair]
            for stored, other in zip(pair, made, strict=True):
                for source, target in moves.items():
                    other[target, :, : self.capacity] = stored[source]
            new._layers[layer] = made[0], made[1]
        return new

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in all layers."""
        return sum(stored.nbytes for pair in self._layers.values() for stored in pair) // (self.slots * self.capacity)

    def drop(self) -> None:
        """Give the memory back."""
        self._layers.clear()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are given with every call."""
        return 0


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    slot_step: Step,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of the new tokens of each row to all of its tokens until then; shapes as transformers has them.

    `s_aux` are scores of a sink for each head, which takes a part of the attention and gives nothing. Products of few queries are filled
    up, as in `agentrl.weights.rows`, so that a token's result is the same whether it is computed alone or as a part of its prompt.
    """
    del attention_mask  # transformers makes none for attention that it does not know
    rows, heads, count, size = query.shape
    groups = heads // key.shape[1]
    keys = torch.arange(key.shape[2], device=query.device)
    places = slot_step.places()  # [B, count]
    if getattr(module, TUNED, False):
        query = query * _temperature(module, places).to(query.dtype)
    chunk = chunk_of(module)
    parts = []
    for first in range(0, count, QUERIES):
        part = query[:, :, first : first + QUERIES]
        number = part.shape[2]
        at = places[:, first : first + number, None]
        seen = keys <= at
        if slot_step.blocks is not None and (sliding_window is not None or not slot_step.in_windows):
            seen |= _in_block(slot_step.blocks, places[:, first : first + number])
        if sliding_window is not None:
            seen &= keys > at - sliding_window
        if chunk:
            seen &= keys // chunk == at // chunk
        flat = part.reshape(rows, key.shape[1], groups * number, size)
        scores = _product(flat, key.transpose(-1, -2)).float() * (size**-0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.view(rows, key.shape[1], groups, number, -1).masked_fill_(~seen[:, None, None], float("-inf"))
        weights = _softmax(scores, s_aux).to(value.dtype).view(rows, key.shape[1], groups * number, -1)
        parts.append(_product(weights, value).reshape(rows, heads, number, -1))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 2)).transpose(1, 2).contiguous(), None


def _in_block(blocks: Tensor, places: Tensor) -> Tensor:
    """Return which keys are in the block of the token at each place. # [B, count, keys] bool."""
    own = blocks.gather(1, places)[..., None]
    return (own == blocks[:, None]) & (own >= 0)


def tune_by_place(model: nn.Module) -> None:
    """Leave the temperature of Llama-4's layers without rotary positions to `attend`.

    transformers takes it from the length of the cache, which rows of different lengths do not share.
    """
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            module.attn_temperature_tuning = False  # type: ignore[assignment]
            setattr(module, TUNED, True)


def _temperature(module: Any, places: Tensor) -> Tensor:
    """Factors of queries # [B, 1, count, 1] at places # [B, count]; formula of transformers' ``Llama4TextAttention``."""
    reached = torch.floor((places.float() + 1.0) / float(module.floor_scale))
    return (torch.log1p(reached) * float(module.attn_scale) + 1.0)[:, None, :, None]


def chunk_of(module: nn.Module) -> int:
    """Return the tokens of a chunk of a layer that attends within its chunk alone, as transformers' configurations say; 0 for others."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or layer >= len(kinds) or kinds[layer] != "chunked_attention":
        return 0
    return int(config.attention_chunk_size)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over keys of scores # [B, key heads, groups, n, keys]; sinks # [heads]."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.float().view(1, *scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply # [B, heads, n, m] and [B, heads, m, k], on a CPU with rows filled up to a multiple of `BLOCK`."""
    if left.device.type != "cpu":
        return left @ right
    count = left.shape[2]
    padded = nn.functional.pad(left, (0, 0, 0, -count % BLOCK)) if count < BLOCK else left
    return (padded @ right)[:, :, :count]


TUNED = "tuned_by_place"
"""Attribute of layers whose temperature `attend` applies."""
BLOCK = 8
"""Fewest rows of a product of attention; with fewer the matrix library sums in another order."""


def padded(tokens: int) -> int:
    """Return the number of keys for as many tokens."""
    return -(-tokens // KEYS) * KEYS


def register() -> None:
    """Make `attend` known to transformers under `NAME`."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)


def make_rows_independent(model: nn.Module) -> None:
    """Make each row of every linear layer's output independent of how many others are computed with it."""
    plans: dict[tuple[int, int, torch.dtype], int] = {}
    for module in model.modules():
        if type(module) is not nn.Linear:
            continue
        key = (module.in_features, module.out_features, module.weight.dtype)
        if key not in plans:
            plans[key] = fewest_rows(_linear_of(module), module.in_features, module.weight.dtype)
        if plans[key] != 1:
            module.forward = _in_blocks(module, plans[key])  # type: ignore[method-assign, assignment]


def _linear_of(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda x: nn.functional.linear(x, module.weight, module.bias)


def _in_blocks(module: nn.Linear, rows: int) -> Callable[[Tensor], Tensor]:
    invariant = RowInvariantLinear(nn.functional.linear, rows)
    return lambda x: invariant(x, module.weight, module.bias)
