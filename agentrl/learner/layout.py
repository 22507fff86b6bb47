"""A few rows of a batch in the shape a model takes, and the way back to flat action tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentrl.core.metrics import MetricSums
from agentrl.learner.batch import Batch

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Rows that go through the model as one sequence; see `agentrl.learner.layout`."""

    rows: tuple[int, ...]  # their numbers in the batch
    prompt: int  # tokens that all of them begin with and that are there once; 0 for a single row
    length: int  # tokens of the sequence
    group: int  # group of the rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Rows that go through the model together, in B sequences of at most L tokens, with `a` action tokens."""

    input_ids: Tensor  # [B, L] or [1, L]: padded on the right, or all rows back to back in one
    real: Tensor  # [B * L] bool: which places of the flattened `input_ids` are not padding
    position_ids: Tensor | None  # [B, L]: places within the row, unless those are the places in the sequence
    attention_mask: Tensor | None  # [B, 1, L, L] bool: who attends to whom, only where rows share a prompt
    select: Tensor  # [a]: where in the flattened `input_ids` the output that predicts each action token is
    targets: Tensor  # [a]: the action tokens
    temperature: Tensor  # [a]: sampling temperature of each action token
    actions: Tensor  # [a]: place of each action token among those of the batch
    num_tokens: int  # tokens without padding
    num_row_tokens: int  # tokens that the rows would have alone

    def inputs(self) -> dict[str, Tensor | None]:
        """Arguments of a transformers model."""
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "attention_mask": self.attention_mask}

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch on another device."""
        tensors = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        moved: dict[str, Any] = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        return replace(self, **moved)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sequence:
    """One bundle laid out."""

    tokens: Ints  # [l]
    position: Ints  # [l]: place of each token within its row
    owner: Ints  # [l]: 0 for the prompt, then which row of the bundle a token belongs to, from 1
    select: Ints  # [a]: where in the sequence each action token is predicted
    actions: Ints  # [a]: those action tokens, by their place in the batch
    num_row_tokens: int  # tokens that the rows would have alone


class Layout:
    """Lays out rows of one batch; all on the CPU, because it is bookkeeping of single tokens."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._tokens, self._position = batch.tokens.numpy(), batch.position.numpy()
        self._starts = batch.offsets.numpy()
        self._bounds = np.searchsorted(batch.row.numpy(), np.arange(batch.num_rows + 1))

    def micro_batch(self, bundles: Sequence[Bundle], *, packed: bool) -> MicroBatch:
        """Take bundles of rows out of the batch; none give a micro-batch without action tokens, for a rank with nothing left to do.

        Causal attention never looks to the right, so padding there needs no mask; tokens after the last action token of a row decide
        nothing and are left out. With `packed` rows are back to back in one sequence, told apart by `position_ids` (flash attention),
        instead of padded; no bundle may then have more than one row.
        """
        if not bundles:
            return self._nothing()
        sequences = [self._sequence(bundle) for bundle in bundles]
        lengths = np.asarray([len(sequence.tokens) for sequence in sequences])
        width = int(lengths.max())
        begins = np.cumsum(lengths) - lengths if packed else np.arange(len(sequences)) * width
        shared = any(len(bundle.rows) > 1 for bundle in bundles)
        join = _in_a_row if packed else _padded
        actions = torch.from_numpy(np.concatenate([sequence.actions for sequence in sequences]))
        return MicroBatch(
            input_ids=join([sequence.tokens for sequence in sequences]),
            real=join([np.ones(length, dtype=np.bool_) for length in lengths]).flatten(),
            position_ids=join([sequence.position for sequence in sequences]) if packed or shared else None,
            attention_mask=_mask([sequence.owner for sequence in sequences]) if shared else None,
            select=torch.from_numpy(np.concatenate([sequence.select + begin for sequence, begin in zip(sequences, begins, strict=True)])),
            targets=self._batch.tokens[self._batch.position[actions]],
            temperature=self._batch.temperature[actions],
            actions=actions,
            num_tokens=int(lengths.sum()),
            num_row_tokens=sum(sequence.num_row_tokens for sequence in sequences),
        )

    def _sequence(self, bundle: Bundle) -> _Sequence:
        prompt, at = bundle.prompt, bundle.prompt
        begin = self._starts[bundle.rows[0]]
        tokens, position, owner = [self._tokens[begin : begin + prompt]], [np.arange(prompt)], [np.zeros(prompt, dtype=np.int64)]
        select, actions = [], []
        for number, row in enumerate(bundle.rows, 1):
            start, span = self._starts[row], slice(self._bounds[row], self._bounds[row + 1])
            predicted = self._position[span] - 1 - start
            end = int(predicted[-1]) + 1
            select.append(np.where(predicted < prompt, predicted, predicted - prompt + at))
            actions.append(np.arange(span.start, span.stop))
            tokens.append(self._tokens[start + prompt : start + end])
            position.append(np.arange(prompt, end))
            owner.append(np.full(end - prompt, number))
            at += end - prompt
        return _Sequence(
            tokens=np.concatenate(tokens),
            position=np.concatenate(position),
            owner=np.concatenate(owner),
            select=np.concatenate(select),
            actions=np.concatenate(actions),
            num_row_tokens=at + (len(bundle.rows) - 1) * prompt,
        )

    def _nothing(self) -> MicroBatch:
        empty = torch.zeros(0, dtype=torch.int64)
        return MicroBatch(
            input_ids=self._batch.tokens[:1][None],
            real=torch.zeros(1, dtype=torch.bool),
            position_ids=None,
            attention_mask=None,
            select=empty,
            targets=empty,
            temperature=self._batch.temperature[:0],
            actions=empty,
            num_tokens=0,
            num_row_tokens=0,
        )


def _in_a_row(arrays: Sequence[npt.NDArray[Any]]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))[None]


def _padded(arrays: Sequence[npt.NDArray[Any]]) -> Tensor:
    return pad_sequence([torch.from_numpy(array) for array in arrays], batch_first=True)


def _mask(owners: Sequence[Ints]) -> Tensor:
    """A token attends to what is before it in the prompt and in its own row; padding to padding, so that nothing is undefined."""
    owner = pad_sequence([torch.from_numpy(array) for array in owners], batch_first=True, padding_value=-1)
    seen = (owner[:, :, None] == owner[:, None, :]) | (owner == 0)[:, None, :]
    return seen.tril()[:, None]


def describe_layout(micros: Sequence[MicroBatch]) -> MetricSums:
    """``padding``, the share of what goes through the model that is padding, and ``micro_batches`` over all ranks.

    Also ``shared_prompts``, the share of the rows' tokens that need not go through it, because they are another row's prompt.
    """
    stats = MetricSums()
    area = sum(micro.input_ids.numel() for micro in micros)
    tokens, row_tokens = sum(micro.num_tokens for micro in micros), sum(micro.num_row_tokens for micro in micros)
    stats.mean("padding", float(area - tokens), float(area))
    stats.mean("shared_prompts", float(row_tokens - tokens), float(row_tokens))
    stats.total("micro_batches", float(len(micros)))
    return stats


PROBE_WIDTH = 1024
"""Width of a model for which sharing six tokens is worth it."""

ROUNDING = 0.25
"""Difference that passes for rounding, as a share of that without a mask; about 1 if a model ignores the mask."""


@dataclass(slots=True)
class _Open:
    rows: list[int]
    length: int


def one_row_bundles(batch: Batch) -> list[Bundle]:
    """Every row as a sequence of its own."""
    return [
        Bundle(rows=(row,), prompt=0, length=length, group=group)
        for row, (length, group) in enumerate(zip(batch.input_lengths().tolist(), batch.row_group().tolist(), strict=True))
    ]


def share_prompts(batch: Batch, *, budget: int, hidden_size: int) -> list[Bundle]:
    """Rows of a group that begin with the same tokens, up to their first action token, in one sequence where that is less work.

    Bundles are in the order of their first rows; one of several rows has at most `budget` tokens. The width of the model, `hidden_size`,
    decides how much attention weighs against everything else.
    """
    prompts, starts = batch.first_actions().tolist(), batch.offsets.tolist()
    tokens = batch.tokens.numpy()
    made: list[tuple[_Open, int, int]] = []
    growing: dict[tuple[int, bytes], _Open] = {}
    for single in one_row_bundles(batch):
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
    """Return True if appending a row's `suffix` to a sequence of `so_far` tokens is less work than the `whole` row alone.

    In multiplications of a layer, over its width: 12 times the width for a token's projections; for attention 2 for every
    pair of tokens where a mask is needed, and half of them where it is plainly causal.
    """
    longer = so_far + suffix
    shared = 12 * hidden_size * suffix + 2 * (longer**2 - so_far**2)
    return longer <= budget and shared <= 12 * hidden_size * whole + whole**2


def can_share(score: Callable[[MicroBatch], Tensor], config: Any, device: torch.device) -> bool:
    """Return True if a model gives the same results for rows that share a prompt as for single rows; tried on the model itself.

    False with a window of attention (rows longer than it would see too much), with layers that carry a state from token to token, or with
    positions that do not come from ``position_ids``. `score` gives the log-probabilities of a micro-batch's action tokens.
    """
    if not _attends_to_everything(config):
        return False
    batch = _probe(config.get_text_config().vocab_size)
    layout = Layout(batch)
    apart = layout.micro_batch(one_row_bundles(batch), packed=False).to(device)
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
