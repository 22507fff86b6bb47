"""A few rows of a batch in the shape a model takes, and the way back to flat action tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentrl.core.errors import BatchError
from agentrl.core.images import ImageInput, PlacedImage, joined_tensors, positions_of, token_types_of
from agentrl.core.metrics import MetricSums
from agentrl.core.types import FloatArray
from agentrl.learner.attention import tree_mask
from agentrl.learner.rows import Row, Rows, moved
from agentrl.learner.trees import Bundle

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Rows that go through the model together, in B sequences of at most L tokens, with `a` action tokens and `p` predictions.

    An action token that rows share is predicted once, and is an action token of each of them.
    """

    input_ids: Tensor  # [B, L] or [1, L]: padded on the right, or all rows back to back in one
    real: Tensor  # [B * L] bool: which places of the flattened `input_ids` are not padding
    position_ids: Tensor | None  # [B, L] or [axes, B, L]: places within the row, unless those are the places in the sequence
    ends: Tensor | None = None  # [B, L]: place behind the last token that each token is an ancestor of, only where rows share tokens
    bounds: Tensor | None = None  # [rows + 1] int32: where rows begin and the last ends, only where they follow each other unshared
    longest: int = 0  # tokens of the longest row, with `bounds`
    packed: bool = False  # rows follow each other in one sequence
    select: Tensor  # [p]: where in the flattened `input_ids` the output of each prediction is
    targets: Tensor  # [p]: the action token that is predicted
    temperature: Tensor  # [p]: sampling temperature of it
    actions: Tensor  # [a]: place of each action token among those of the batch
    prediction: Tensor | None = None  # [a]: which prediction is that of each action token, where rows share some; `None`: p = a
    experts: Tensor | None = None  # [B * L, layers, top_k] int16: experts of each place in the engine, -1 where they are not known
    num_tokens: int  # tokens without padding
    num_row_tokens: int  # tokens that the rows would have alone
    pixels: Mapping[str, Tensor] = field(default_factory=dict)  # arguments of the model with images, in the order of their tokens
    top_k: int = 0  # most likely tokens that are wanted at the place of each action token
    hidden: bool = False  # what enters the output layer is wanted, for another model to be compared with
    teacher: Tensor | None = None  # [p, ...]: the same of a teacher, with which the model is to be compared

    def inputs(self) -> dict[str, Any]:
        """Arguments of a transformers model; a mask is made here, on the device, because it is larger than all the rest."""
        inputs: dict[str, Any] = {"input_ids": self.input_ids, "position_ids": self.position_ids, "attention_mask": None, **self.pixels}
        if self.ends is not None:
            inputs["attention_mask"] = tree_mask(self.ends[0]) if self.packed else _dense_mask(self.ends)
        if self.bounds is not None:
            inputs |= {"cu_seq_lens_q": self.bounds, "cu_seq_lens_k": self.bounds}
            inputs |= {"max_length_q": self.longest, "max_length_k": self.longest}
            # The convolutions of hybrid models want the number of the row of every token instead.
            numbers = torch.arange(len(self.bounds) - 1, dtype=torch.int32, device=self.bounds.device)
            inputs["seq_idx"] = numbers.repeat_interleave(self.bounds.diff(), output_size=self.input_ids.shape[1])[None]
        return inputs

    def by_action(self, found: Tensor) -> Tensor:
        """Return what was found for each prediction # [p, ...] for each action token. # [a, ...]."""
        return found if self.prediction is None else found[self.prediction]

    def predicted_apart(self) -> MicroBatch:
        """The same micro-batch with a prediction for each action token, so that they may be asked for different tokens."""
        select, targets, temperature = map(self.by_action, (self.select, self.targets, self.temperature))
        return replace(self, select=select, targets=targets, temperature=temperature, prediction=None)

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch on another device."""
        pixels = {name: tensor.to(device, non_blocking=True) for name, tensor in self.pixels.items()}
        return replace(moved(self, device), pixels=pixels)


@dataclass(frozen=True, slots=True, eq=False)
class _Predictions:
    """Action tokens of a sequence as `MicroBatch` has them."""

    select: Ints  # [p]: place in the sequence
    targets: Ints  # [p]
    temperature: FloatArray  # [p]
    number: Ints  # [a]

    @staticmethod
    def of(select: Ints, targets: Ints, temperature: FloatArray, *, shared: bool) -> _Predictions:
        """Return the predictions of action tokens # [a] each; equal ones once, with `shared`, in the order of their first."""
        everything = np.arange(len(select))
        if not shared:
            return _Predictions(select, targets, temperature, everything)
        equal = np.stack([select, targets, temperature.view(np.int32)])
        _, first, number = np.unique(equal, axis=1, return_index=True, return_inverse=True)
        kept = np.sort(first)
        return _Predictions(select[kept], targets[kept], temperature[kept], np.searchsorted(kept, first[number.flatten()]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sequence:
    """One bundle laid out."""

    tokens: Ints  # [l]
    position: Ints  # [axes, l]: place of each token within its row, or what the model has in its stead
    ends: Ints  # [l]: place behind the last token that each token is an ancestor of
    predictions: _Predictions
    actions: Ints  # [a]: place of each action token among those of the batch
    experts: npt.NDArray[np.int16] | None  # [l, layers, top_k]: experts of each token in the engine, -1 where they are not known
    num_row_tokens: int  # tokens that the rows would have alone
    images: tuple[ImageInput, ...] = ()  # in the order of their tokens
    types: Mapping[str, Ints] = field(default_factory=dict)  # [l] each: arguments of the model that mark the tokens of images


class Layout:
    """Lays out rows of one batch; all on the CPU, because it is bookkeeping of single tokens. Rows that nobody asks for cost nothing."""

    def __init__(self, batch: Rows) -> None:
        self._rows = batch.rows
        self._bounds = np.concatenate([[0], np.cumsum(batch.row_actions.numpy())])
        self._experts = batch.experts_shape()
        self._image = batch.first_image()
        positions = None if self._image is None else self._image.positions
        self._axes = 1 if positions is None else len(positions)

    def micro_batch(self, bundles: Sequence[Bundle], *, packed: bool) -> MicroBatch:
        """Take bundles of rows out of the batch; none give a micro-batch without action tokens, for a rank with nothing left to do.

        Causal attention never looks to the right, so padding there needs no mask; tokens after the last action token of a row decide
        nothing and are left out. With `packed` rows are back to back in one sequence instead of padded.
        """
        if not bundles and self._image is None:
            return self._nothing()
        sequences = [self._sequence(bundle) for bundle in bundles]
        if self._image is not None and not any(sequence.images for sequence in sequences):
            sequences.append(self._only_image(self._image))
        images = [image for sequence in sequences for image in sequence.images]
        lengths = np.asarray([len(sequence.tokens) for sequence in sequences])
        width = int(lengths.max())
        begins = np.cumsum(lengths) - lengths if packed else np.arange(len(sequences)) * width
        shared = any(len(bundle.rows) > 1 for bundle in bundles)
        join = _in_a_row if packed else _padded
        if (packed or shared) and self._image is not None and self._image.token_types:
            raise BatchError("images whose tokens attend to each other in both directions need padded rows that share nothing")
        places = packed or shared or self._axes > 1
        return MicroBatch(
            input_ids=join([sequence.tokens for sequence in sequences]),
            real=join([np.ones(length, dtype=np.bool_) for length in lengths]).flatten(),
            position_ids=_stacked([sequence.position for sequence in sequences], join) if places else None,
            ends=_ends(sequences, begins, packed=packed) if shared else None,
            **(_bounds(lengths) if packed and not shared else {}),
            packed=packed,
            **_joined_predictions([sequence.predictions for sequence in sequences], begins),
            actions=torch.from_numpy(np.concatenate([sequence.actions for sequence in sequences])),
            experts=_joined_experts(sequences, packed=packed),
            num_tokens=int(lengths.sum()),
            num_row_tokens=sum(sequence.num_row_tokens for sequence in sequences),
            pixels={name: torch.from_numpy(array) for name, array in joined_tensors(images).items()} | _types(sequences, join),
        )

    def _only_image(self, image: ImageInput) -> _Sequence:
        """An image without action tokens, for rows without images: ranks gather and sum the vision part's parameters together."""
        length, nothing, placed = len(image.token_ids), np.zeros(0, dtype=np.int64), (PlacedImage(0, image),)
        return _Sequence(
            tokens=image.token_ids.astype(np.int64),
            position=positions_of(length, placed, self._axes),
            ends=np.full(length, length),
            predictions=_Predictions(nothing, nothing, np.zeros(0, dtype=np.float32), nothing),
            actions=nothing,
            experts=None if self._experts is None else np.full((length, *self._experts), -1, np.int16),
            num_row_tokens=length,
            images=(image,),
            types=token_types_of(length, placed),
        )

    def _sequence(self, bundle: Bundle) -> _Sequence:
        rows = [self._rows[row] for row in bundle.rows]
        tokens, position, select, targets, images = [], [], [], [], list[PlacedImage]()
        ends, path, at, num_row_tokens = np.full(bundle.length, bundle.length), np.zeros(0, dtype=np.int64), 0, 0
        for row, shared in zip(rows, bundle.shared, strict=True):
            row_tokens, reads = row.tokens, row.reads
            end = int(reads[-1]) + 1
            # What the row before does not share with this one has no descendants from here on.
            ends[path[shared:]] = at
            path = np.concatenate([path[:shared], np.arange(at, at + end - shared)])
            select.append(path[reads])
            # Behind a last token that is read, for a model that predicts no token, is none.
            targets.append(row_tokens[reads + 1] if end < len(row_tokens) else np.append(row_tokens, 0)[reads + 1])
            tokens.append(row_tokens[shared:end])
            position.append(positions_of(end, row.images, self._axes)[:, shared:])
            images += [each for each in row.images if each.place >= shared]
            at += end - shared
            num_row_tokens += end
        temperature = np.concatenate([row.temperatures for row in rows])
        found = np.concatenate(select), np.concatenate(targets).astype(np.int64), temperature
        return _Sequence(
            tokens=np.concatenate(tokens).astype(np.int64),
            position=np.concatenate(position, axis=1),
            ends=ends,
            predictions=_Predictions.of(*found, shared=len(rows) > 1),
            actions=np.concatenate([np.arange(self._bounds[row], self._bounds[row + 1]) for row in bundle.rows]),
            experts=self._bundle_experts(rows, bundle.shared),
            num_row_tokens=num_row_tokens,
            images=tuple(each.image for each in images),
            types={} if len(rows) > 1 else token_types_of(at, rows[0].images),
        )

    def _bundle_experts(self, rows: Sequence[Row], shared: Sequence[int]) -> npt.NDArray[np.int16] | None:
        if self._experts is None:
            return None
        parts: list[npt.NDArray[np.int16]] = []
        for row, begin in zip(rows, shared, strict=True):
            found = row.experts
            whole = np.full((len(row.tokens) - 1, *self._experts), -1, np.int16) if found is None else found
            parts.append(whole[begin:])
        return np.concatenate(parts)

    def _nothing(self) -> MicroBatch:
        empty = torch.zeros(0, dtype=torch.int64)
        return MicroBatch(
            input_ids=torch.tensor([[int(self._rows[0].tokens[0])]]),
            real=torch.zeros(1, dtype=torch.bool),
            position_ids=None,
            select=empty,
            targets=empty,
            temperature=torch.zeros(0),
            actions=empty,
            num_tokens=0,
            num_row_tokens=0,
        )


def _in_a_row(arrays: Sequence[npt.NDArray[Any]]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))[None]


def _padded(arrays: Sequence[npt.NDArray[Any]]) -> Tensor:
    return pad_sequence([torch.from_numpy(array) for array in arrays], batch_first=True)


def _stacked(positions: Sequence[Ints], join: Callable[[Sequence[Ints]], Tensor]) -> Tensor:
    """Return positions of sequences joined # [B, L], or # [axes, B, L] where a token has several."""
    axes = [join(axis) for axis in zip(*positions, strict=True)]
    return axes[0] if len(axes) == 1 else torch.stack(axes)


def _types(sequences: Sequence[_Sequence], join: Callable[[Sequence[Ints]], Tensor]) -> dict[str, Tensor]:
    """Return the arguments of the model that mark the tokens of images, 0 for others. # [B, L] each."""
    names = {name for sequence in sequences for name in sequence.types}
    return {name: join([sequence.types.get(name, np.zeros_like(sequence.tokens)) for sequence in sequences]) for name in sorted(names)}


def _joined_experts(sequences: Sequence[_Sequence], *, packed: bool) -> Tensor | None:
    parts = [torch.from_numpy(sequence.experts) for sequence in sequences if sequence.experts is not None]
    if not parts:
        return None
    return torch.cat(parts) if packed else pad_sequence(parts, batch_first=True, padding_value=-1).flatten(0, 1)


def _joined_predictions(parts: Sequence[_Predictions], begins: Ints) -> dict[str, Any]:
    """Return the predictions of sequences that begin at some places of a micro-batch, by their names there."""
    select = np.concatenate([part.select + begin for part, begin in zip(parts, begins, strict=True)])
    counts = np.cumsum([0, *(len(part.select) for part in parts)])
    number = np.concatenate([part.number + count for part, count in zip(parts, counts, strict=False)])
    return {
        "select": torch.from_numpy(select),
        "targets": torch.from_numpy(np.concatenate([part.targets for part in parts])),
        "temperature": torch.from_numpy(np.concatenate([part.temperature for part in parts])),
        "prediction": torch.from_numpy(number) if len(number) > len(select) else None,
    }


def _ends(sequences: Sequence[_Sequence], begins: Ints, *, packed: bool) -> Tensor:
    """`ends` of a micro-batch; padding sees the padding before it, so that nothing is undefined."""
    if packed:
        return _in_a_row([sequence.ends + begin for sequence, begin in zip(sequences, begins, strict=True)])
    width = max(len(sequence.ends) for sequence in sequences)
    return pad_sequence([torch.from_numpy(sequence.ends) for sequence in sequences], batch_first=True, padding_value=width)


def _bounds(lengths: Ints) -> dict[str, Any]:
    bounds = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    return {"bounds": bounds, "longest": int(lengths.max())}


def _dense_mask(ends: Tensor) -> Tensor:
    """A token attends to itself and its ancestors: to what stands before it and has not ended. # [B, L] -> [B, 1, L, L] bool."""
    places = torch.arange(ends.shape[1], device=ends.device)
    return (places[:, None] < ends[:, None, :]).tril()[:, None]


def describe_layout(micros: Sequence[MicroBatch]) -> MetricSums:
    """``padding``, the share of what goes through the model that is padding, and ``micro_batches`` over all ranks.

    Also ``shared_prompts``, the share of the rows' tokens that need not go through it, because another row begins with them too, and their
    number, ``tokens/saved``.
    """
    stats = MetricSums()
    area = sum(micro.input_ids.numel() for micro in micros)
    tokens, row_tokens = sum(micro.num_tokens for micro in micros), sum(micro.num_row_tokens for micro in micros)
    stats.mean("padding", float(area - tokens), float(area))
    stats.mean("shared_prompts", float(row_tokens - tokens), float(row_tokens))
    stats.total("tokens/saved", float(row_tokens - tokens))
    stats.total("micro_batches", float(len(micros)))
    return stats
