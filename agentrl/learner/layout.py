"""A few rows of a batch in the shape a model takes, and the way back to flat action tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentrl.learner.batch import Batch

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Rows that go through the model as one sequence; see `agentrl.learner.bundles`.

    Attributes:
        rows: Their numbers in the batch.
        prompt: Tokens that all of them begin with and that are there once; 0 for a single row.
        length: Tokens of the sequence.
        group: Group of the rows.
    """

    rows: tuple[int, ...]
    prompt: int
    length: int
    group: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Rows that go through the model together, in B sequences of at most L tokens, with `a` action tokens.

    Attributes:
        input_ids: Padded on the right, or all rows back to back in one. # [B, L] or [1, L]
        real: Which places of the flattened `input_ids` are not padding. # [B * L] bool
        position_ids: Places within the row, unless those are the places in the sequence. # [B, L]
        attention_mask: Who attends to whom, only where rows share a prompt. # [B, 1, L, L] bool
        select: Where in the flattened `input_ids` the output that predicts each action token is. # [a]
        targets: The action tokens. # [a]
        temperature: Sampling temperature of each action token. # [a]
        actions: Place of each action token among those of the batch. # [a]
        num_tokens: Tokens without padding.
        num_row_tokens: Tokens that the rows would have alone.
    """

    input_ids: Tensor
    real: Tensor
    position_ids: Tensor | None
    attention_mask: Tensor | None
    select: Tensor
    targets: Tensor
    temperature: Tensor
    actions: Tensor
    num_tokens: int
    num_row_tokens: int

    def inputs(self) -> dict[str, Tensor | None]:
        """What a transformers model takes."""
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "attention_mask": self.attention_mask}

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch on another device."""
        tensors = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        moved: dict[str, Any] = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        return replace(self, **moved)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sequence:
    """One bundle laid out.

    Attributes:
        tokens: # [l]
        position: Place of each token within its row. # [l]
        owner: 0 for the prompt, then which row of the bundle a token belongs to, from 1. # [l]
        select: Where in the sequence each action token is predicted. # [a]
        actions: Those action tokens, by their place in the batch. # [a]
        num_row_tokens: Tokens that the rows would have alone.
    """

    tokens: Ints
    position: Ints
    owner: Ints
    select: Ints
    actions: Ints
    num_row_tokens: int


class Layout:
    """Lays out rows of one batch; all on the CPU, because it is bookkeeping of single tokens.

    Args:
        batch: On the CPU.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._tokens, self._position = batch.tokens.numpy(), batch.position.numpy()
        self._starts = batch.offsets.numpy()
        self._bounds = np.searchsorted(batch.row.numpy(), np.arange(batch.num_rows + 1))

    def micro_batch(self, bundles: Sequence[Bundle], *, packed: bool) -> MicroBatch:
        """Take rows out of the batch.

        Causal attention never looks to the right, so padding there needs no mask; tokens after the last action token of a
        row decide nothing and are left out.

        Args:
            bundles: What to take; nothing gives a micro-batch without action tokens, for a rank with nothing left to do.
            packed: Rows back to back in one sequence, told apart by `position_ids` (flash attention), instead of padded;
                no bundle may then have more than one row.
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
