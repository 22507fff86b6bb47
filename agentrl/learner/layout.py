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

from agentrl.config.model_shape import attends_to_everything, text_part
from agentrl.core.images import ImageInput, PlacedImage, joined_tensors
from agentrl.core.metrics import MetricSums
from agentrl.core.types import FinishReason, FloatArray, Group, IntArray, Status, Task, Trajectory, Turn, floats, ints
from agentrl.learner.attention import tree_mask
from agentrl.learner.batch import Batch, Row, collate, experts_shape, moved
from agentrl.learner.trees import Bundle, one_row_bundles, share_prefixes

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Rows that go through the model together, in B sequences of at most L tokens, with `a` action tokens and `p` predictions.

    An action token that rows share is predicted once, and is an action token of each of them.
    """

    input_ids: Tensor  # [B, L] or [1, L]: padded on the right, or all rows back to back in one
    real: Tensor  # [B * L] bool: which places of the flattened `input_ids` are not padding
    position_ids: Tensor | None  # [B, L]: places within the row, unless those are the places in the sequence
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
    pixels: Mapping[str, Tensor] = field(default_factory=dict)  # arguments of the model with its images, in the order of their tokens
    top_k: int = 0  # most likely tokens that are wanted at the place of each action token

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
    position: Ints  # [l]: place of each token within its row
    ends: Ints  # [l]: place behind the last token that each token is an ancestor of
    predictions: _Predictions
    actions: Ints  # [a]: place of each action token among those of the batch
    experts: npt.NDArray[np.int16] | None  # [l, layers, top_k]: experts of each token in the engine, -1 where they are not known
    num_row_tokens: int  # tokens that the rows would have alone
    images: tuple[ImageInput, ...] = ()  # in the order of their tokens


class Layout:
    """Lays out rows of one batch; all on the CPU, because it is bookkeeping of single tokens. Rows that nobody asks for cost nothing."""

    def __init__(self, batch: Batch) -> None:
        self._rows = batch.rows
        self._bounds = np.concatenate([[0], np.cumsum(batch.row_actions.numpy())])
        self._experts = experts_shape(turn for row in batch.rows for turn in row.turns)
        self._image = next((each.image for row in batch.rows for turn in row.turns for each in turn.images), None)

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
        return MicroBatch(
            input_ids=join([sequence.tokens for sequence in sequences]),
            real=join([np.ones(length, dtype=np.bool_) for length in lengths]).flatten(),
            position_ids=join([sequence.position for sequence in sequences]) if packed or shared else None,
            ends=_ends(sequences, begins, packed=packed) if shared else None,
            **(_bounds(lengths) if packed and not shared else {}),
            packed=packed,
            **_joined_predictions([sequence.predictions for sequence in sequences], begins),
            actions=torch.from_numpy(np.concatenate([sequence.actions for sequence in sequences])),
            experts=_joined_experts(sequences, packed=packed),
            num_tokens=int(lengths.sum()),
            num_row_tokens=sum(sequence.num_row_tokens for sequence in sequences),
            pixels={name: torch.from_numpy(array) for name, array in joined_tensors(images).items()},
        )

    def _only_image(self, image: ImageInput) -> _Sequence:
        """An image without action tokens, for rows without images: ranks gather and sum the vision part's parameters together."""
        length, nothing = len(image.token_ids), np.zeros(0, dtype=np.int64)
        return _Sequence(
            tokens=image.token_ids.astype(np.int64),
            position=np.arange(length),
            ends=np.full(length, length),
            predictions=_Predictions(nothing, nothing, np.zeros(0, dtype=np.float32), nothing),
            actions=nothing,
            experts=None if self._experts is None else np.full((length, *self._experts), -1, np.int16),
            num_row_tokens=length,
            images=(image,),
        )

    def _sequence(self, bundle: Bundle) -> _Sequence:
        rows = [self._rows[row] for row in bundle.rows]
        tokens, position, select, targets, images = [], [], [], [], list[PlacedImage]()
        ends, path, at, num_row_tokens = np.full(bundle.length, bundle.length), np.zeros(0, dtype=np.int64), 0, 0
        for row, shared in zip(rows, bundle.shared, strict=True):
            row_tokens, places = row.tokens, row.action_positions
            end = int(places[-1])
            # What the row before does not share with this one has no descendants from here on.
            ends[path[shared:]] = at
            path = np.concatenate([path[:shared], np.arange(at, at + end - shared)])
            select.append(path[places - 1])
            targets.append(row_tokens[places])
            tokens.append(row_tokens[shared:end])
            position.append(np.arange(shared, end))
            images += [each for each in row.images if each.place >= shared]
            at += end - shared
            num_row_tokens += end
        temperature = np.concatenate([row.temperatures for row in rows])
        found = np.concatenate(select), np.concatenate(targets).astype(np.int64), temperature
        return _Sequence(
            tokens=np.concatenate(tokens).astype(np.int64),
            position=np.concatenate(position),
            ends=ends,
            predictions=_Predictions.of(*found, shared=len(rows) > 1),
            actions=np.concatenate([np.arange(self._bounds[row], self._bounds[row + 1]) for row in bundle.rows]),
            experts=self._bundle_experts(rows, bundle.shared),
            num_row_tokens=num_row_tokens,
            images=tuple(each.image for each in images),
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
            input_ids=torch.tensor([[int(self._rows[0].turns[0].prompt_ids[0])]]),
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


PROBE_WIDTH = 1024
"""Width of a model for which sharing a few tokens is worth it."""

ROUNDING = {torch.float32: 0.01, torch.bfloat16: 0.25}
"""Difference that passes for rounding, as a share of that without a mask; about 1 if a model ignores the mask."""


def can_share(score: Callable[[MicroBatch], Tensor], config: Any, device: torch.device, *, packed: bool = False, rounding: float) -> bool:
    """Return True if a model gives the same results for rows that share tokens as for single rows; tried on the model itself.

    False with a window of attention (rows longer than it would see too much), with layers that carry a state from token to token, or with
    positions that do not come from ``position_ids``. `score` gives the log-probabilities of a micro-batch's action tokens; differences
    up to `rounding`, as a share of that without a mask, are taken for rounding.
    """
    if not attends_to_everything(config):
        return False
    batch = probe_batch(text_part(config)["vocab_size"])
    bundles = share_prefixes(batch, budget=batch.num_tokens, hidden_size=PROBE_WIDTH)
    together = Layout(batch).micro_batch(bundles, packed=packed)
    mixed_up = replace(together, ends=None, position_ids=None)
    return _alike(score, together, mixed_up, probe(config), device, rounding)


def can_pack(score: Callable[[MicroBatch], Tensor], config: Any, device: torch.device, *, rounding: float) -> bool:
    """Return True if rows back to back do not see each other; tried on the model itself, with arguments as in `can_share`."""
    together = probe(config, packed=True)
    mixed_up = replace(together, bounds=None, position_ids=None)
    return _alike(score, together, mixed_up, probe(config), device, rounding)


@torch.no_grad()
def _alike(
    score: Callable[[MicroBatch], Tensor],
    together: MicroBatch,
    mixed_up: MicroBatch,
    apart: MicroBatch,
    device: torch.device,
    rounding: float,
) -> bool:
    """Return True if `together` has the scores of `apart`, by comparison with rows that see each other."""
    try:
        found = in_order(together, score(together.to(device)))
    except (TypeError, ValueError, RuntimeError, IndexError):  # a model that takes no such mask says so in one of many ways
        return False
    expected, mixed = (in_order(micro, score(micro.to(device))) for micro in (apart, mixed_up))
    return bool((found - expected).abs().mean() < rounding * (mixed - expected).abs().mean())


def in_order(micro: MicroBatch, found: Tensor) -> Tensor:
    """Return what was found for the action tokens of a micro-batch in the order of the batch. # [a]."""
    return found[micro.actions.argsort().to(found.device)]


def probe(config: Any, *, packed: bool = False) -> MicroBatch:
    """A few rows to try a model of this configuration on."""
    batch = probe_batch(text_part(config)["vocab_size"])
    return Layout(batch).micro_batch(one_row_bundles(batch), packed=packed)


def probe_batch(vocabulary: int, *, prompt: int = 6, sampled: Sequence[int] = (3, 5, 4)) -> Batch:
    """Rows of one group that begin with the same prompt, each answer with a third of the one before; numbers of tokens."""
    answers = [(6 + np.arange(length) * (number + 2)) * 7 % vocabulary for number, length in enumerate(sampled)]
    return batch_of([(np.arange(prompt) * 7 % vocabulary, branching(answers))])


def branching(answers: Sequence[Ints]) -> list[Ints]:
    """Return the answers, each but the first with a third of the one before at its beginning."""
    found: list[Ints] = []
    for answer in answers:
        common = min(len(answer), len(found[-1])) // 3 if found else 0
        found.append(np.concatenate([found[-1][:common], answer[common:]]) if common else answer)
    return found


def batch_of(groups: Sequence[tuple[Ints, Sequence[Ints]]]) -> Batch:
    """Rows of groups, each with the token ids of its prompt and of the answers to it, to try a model on."""
    return collate([_group(number, ints(prompt.tolist()), answers) for number, (prompt, answers) in enumerate(groups)])


def _group(number: int, prompt: IntArray, answers: Sequence[Ints]) -> Group:
    turns = [
        Turn(
            prompt_ids=prompt,
            token_ids=ints(answer.tolist()),
            logprobs=floats([0.0] * len(answer)),
            versions=ints([0] * len(answer)),
            finish_reason=FinishReason.STOP,
        )
        for answer in answers
    ]
    names = [f"{number}-{member}" for member in range(len(turns))]
    trajectories = tuple(
        Trajectory(trajectory_id=name, episode_id=name, group_id=number, turns=(turn,), status=Status.FINISHED, reward=0.0)
        for name, turn in zip(names, turns, strict=True)
    )
    return Group(group_id=number, task=Task(""), trajectories=trajectories)
