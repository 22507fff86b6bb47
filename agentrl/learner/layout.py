"""A few rows of a batch in the shape a model takes, and the way back to flat action tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentrl.config.model_shape import attends_to_everything, text_part
from agentrl.core.images import ImageInput, joined_tensors
from agentrl.core.metrics import MetricSums
from agentrl.core.types import FinishReason, FloatArray, Group, IntArray, Status, Task, Trajectory, Turn, floats, ints
from agentrl.learner.attention import BLOCK, PADDED, Costs, shared_prompt_mask
from agentrl.learner.batch import Batch, Row, collate, experts_shape, moved
from agentrl.learner.sharding import busiest, work

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
    segment: Tensor | None = None  # [B, L]: number of the prompt, or of the rest of a row, only where rows share a prompt; -1 for padding
    prompt: Tensor | None = None  # [B, L]: number of the segment that is the prompt of the token's row
    bounds: Tensor | None = None  # [rows + 1] int32: where rows begin and the last ends, only where they follow each other unshared
    longest: int = 0  # tokens of the longest row, with `bounds`
    packed: bool = False  # rows follow each other in one sequence
    select: Tensor  # [a]: where in the flattened `input_ids` the output that predicts each action token is
    targets: Tensor  # [a]: the action tokens
    temperature: Tensor  # [a]: sampling temperature of each action token
    actions: Tensor  # [a]: place of each action token among those of the batch
    experts: Tensor | None = None  # [B * L, layers, top_k] int16: experts of each place in the engine, -1 where they are not known
    num_tokens: int  # tokens without padding
    num_row_tokens: int  # tokens that the rows would have alone
    pixels: Mapping[str, Tensor] = field(default_factory=dict)  # arguments of the model with its images, in the order of their tokens
    top_k: int = 0  # most likely tokens that are wanted at the place of each action token

    def inputs(self) -> dict[str, Any]:
        """Arguments of a transformers model; a mask is made here, on the device, because it is larger than all the rest."""
        inputs: dict[str, Any] = {"input_ids": self.input_ids, "position_ids": self.position_ids, "attention_mask": None, **self.pixels}
        if self.segment is not None and self.prompt is not None:
            packed = self.packed
            inputs["attention_mask"] = (
                shared_prompt_mask(self.segment[0], self.prompt[0]) if packed else _dense_mask(self.segment, self.prompt)
            )
        if self.bounds is not None:
            inputs |= {"cu_seq_lens_q": self.bounds, "cu_seq_lens_k": self.bounds}
            inputs |= {"max_length_q": self.longest, "max_length_k": self.longest}
            # The convolutions of hybrid models want the number of the row of every token instead.
            numbers = torch.arange(len(self.bounds) - 1, dtype=torch.int32, device=self.bounds.device)
            inputs["seq_idx"] = numbers.repeat_interleave(self.bounds.diff(), output_size=self.input_ids.shape[1])[None]
        return inputs

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch on another device."""
        pixels = {name: tensor.to(device, non_blocking=True) for name, tensor in self.pixels.items()}
        return replace(moved(self, device), pixels=pixels)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sequence:
    """One bundle laid out."""

    tokens: Ints  # [l]
    position: Ints  # [l]: place of each token within its row
    owner: Ints  # [l]: 0 for the prompt, then which row of the bundle a token belongs to, from 1
    select: Ints  # [a]: where in the sequence each action token is predicted
    targets: Ints  # [a]: the action tokens
    temperature: FloatArray  # [a]: sampling temperature of each action token
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
            **(_segments(sequences, packed=packed) if shared else {}),
            **(_bounds(lengths) if packed and not shared else {}),
            packed=packed,
            select=torch.from_numpy(np.concatenate([sequence.select + begin for sequence, begin in zip(sequences, begins, strict=True)])),
            targets=torch.from_numpy(np.concatenate([sequence.targets for sequence in sequences])),
            temperature=torch.from_numpy(np.concatenate([sequence.temperature for sequence in sequences])),
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
            owner=np.zeros(length, dtype=np.int64),
            select=nothing,
            targets=nothing,
            temperature=np.zeros(0, dtype=np.float32),
            actions=nothing,
            experts=None if self._experts is None else np.full((length, *self._experts), -1, np.int16),
            num_row_tokens=length,
            images=(image,),
        )

    def _sequence(self, bundle: Bundle) -> _Sequence:
        prompt, at = bundle.prompt, bundle.prompt
        rows = [self._rows[row] for row in bundle.rows]
        tokens, position, owner = [rows[0].tokens[:prompt]], [np.arange(prompt)], [np.zeros(prompt, dtype=np.int64)]
        select, targets = [], []
        for number, row in enumerate(rows, 1):
            row_tokens, places = row.tokens, row.action_positions
            predicted = places.astype(np.int64) - 1
            end = int(places[-1])
            select.append(np.where(predicted < prompt, predicted, predicted - prompt + at))
            targets.append(row_tokens[places])
            tokens.append(row_tokens[prompt:end])
            position.append(np.arange(prompt, end))
            owner.append(np.full(end - prompt, number))
            at += end - prompt
        return _Sequence(
            tokens=np.concatenate(tokens).astype(np.int64),
            position=np.concatenate(position),
            owner=np.concatenate(owner),
            select=np.concatenate(select),
            targets=np.concatenate(targets).astype(np.int64),
            temperature=np.concatenate([row.temperatures for row in rows]),
            actions=np.concatenate([np.arange(self._bounds[row], self._bounds[row + 1]) for row in bundle.rows]),
            experts=self._bundle_experts(rows, prompt),
            num_row_tokens=at + (len(bundle.rows) - 1) * prompt,
            images=tuple(each.image for number, row in enumerate(rows) for each in row.images if not number or each.place >= prompt),
        )

    def _bundle_experts(self, rows: Sequence[Row], prompt: int) -> npt.NDArray[np.int16] | None:
        if self._experts is None:
            return None
        parts: list[npt.NDArray[np.int16]] = []
        for row in rows:
            found = row.experts
            whole = np.full((len(row.tokens) - 1, *self._experts), -1, np.int16) if found is None else found
            parts += [whole[prompt:]] if parts else [whole]
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


def _segments(sequences: Sequence[_Sequence], *, packed: bool) -> dict[str, Any]:
    """`segment` and `prompt` of a micro-batch; numbers ascend from sequence to sequence."""
    firsts = np.cumsum([0, *(int(sequence.owner[-1]) + 1 for sequence in sequences)])
    segment = [torch.from_numpy(sequence.owner + first) for sequence, first in zip(sequences, firsts, strict=False)]
    prompt = [torch.full((len(own),), int(first)) for own, first in zip(segment, firsts, strict=False)]
    if packed:
        return {"segment": torch.cat(segment)[None], "prompt": torch.cat(prompt)[None]}
    pad = functools.partial(pad_sequence, batch_first=True, padding_value=-1)
    return {"segment": pad(segment), "prompt": pad(prompt)}


def _bounds(lengths: Ints) -> dict[str, Any]:
    bounds = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    return {"bounds": bounds, "longest": int(lengths.max())}


def _dense_mask(segment: Tensor, prompt: Tensor) -> Tensor:
    """A token attends to what is before it in the prompt and in its own row; padding to padding, so that nothing is undefined."""
    keys = segment[:, None, :]
    return ((segment[:, :, None] == keys) | (prompt[:, :, None] == keys)).tril()[:, None]


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

ROUNDING = {torch.float32: 0.01, torch.bfloat16: 0.25}
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


def share_prompts(batch: Batch, *, budget: int, hidden_size: int, parts: int = 1, costs: Costs = PADDED) -> list[Bundle]:
    """Rows of a group that begin with the same tokens, up to their first action token, in one sequence where that is less work.

    Bundles are in the order of their first rows; one of several rows has at most `budget` tokens. The width of the model, `hidden_size`,
    and the kernel's `costs` decide how much attention weighs against everything else. With several `parts` (ranks times mini-batches) the
    bundles are kept so short that the busiest part has the least work: while others wait, one rank saves nothing with a prompt that it
    computes once.
    """
    prompts = _same_prompts(batch)
    if parts == 1:
        return _shared(batch, prompts, budget, hidden_size, costs)
    fair = batch.num_tokens // parts
    limits = [budget, *(limit for limit in (fair, fair // 2, fair // 4, fair // 8, 0) if limit < budget)]
    candidates = [_shared(batch, prompts, limit, hidden_size, costs) for limit in limits]
    return min(candidates, key=lambda bundles: busiest([work(bundle.length, hidden_size) for bundle in bundles], parts))


def _same_prompts(batch: Batch) -> list[int]:
    """Number of the beginning of each row; rows of a group with the same number have the same tokens before their first action token.

    The engine chose the same experts for them, too.
    """
    seen: dict[tuple[int, bytes], int] = {}
    firsts = (_beginning(row.turns[0]) for row in batch.rows)
    return [seen.setdefault(key, len(seen)) for key in zip(batch.row_group().tolist(), firsts, strict=True)]


def _beginning(turn: Turn) -> bytes:
    experts = b"" if turn.experts is None else turn.experts[: len(turn.prompt_ids)].tobytes()
    return turn.prompt_ids.tobytes() + experts + "".join(each.image.key for each in turn.images).encode()


def _shared(batch: Batch, prompts: Sequence[int], budget: int, hidden_size: int, costs: Costs) -> list[Bundle]:
    made: list[tuple[_Open, int, int]] = []
    growing: dict[int, _Open] = {}
    for single in one_row_bundles(batch):
        (row,) = single.rows
        prompt = len(batch.rows[row].turns[0].prompt_ids)
        bundle = growing.get(prompts[row])
        if bundle is not None and _worth_it(bundle.length, prompt, single.length, budget, hidden_size, costs):
            bundle.rows.append(row)
            bundle.length += single.length - prompt
        else:
            growing[prompts[row]] = _Open([row], single.length)
            made.append((growing[prompts[row]], prompt, single.group))
    return [
        Bundle(rows=tuple(bundle.rows), prompt=prompt if len(bundle.rows) > 1 else 0, length=bundle.length, group=group)
        for bundle, prompt, group in made
    ]


def _worth_it(so_far: int, prompt: int, whole: int, budget: int, hidden_size: int, costs: Costs) -> bool:
    """Return True if appending a `whole` row without its `prompt` to a sequence of `so_far` tokens is less work than the row alone.

    In multiplications of a layer, over its width: 12 times the width for a token's projections; for attention 2 for every pair of
    tokens that the kernel computes, times what a multiplication there costs.
    """
    suffix = whole - prompt
    longer = so_far + suffix
    pairs = suffix * (prompt + BLOCK) + suffix**2 / 2 if costs.skips else longer**2 - so_far**2
    shared = 12 * hidden_size * suffix + 2 * costs.masked * pairs
    return longer <= budget and shared <= 12 * hidden_size * whole + costs.causal * whole**2


def can_share(score: Callable[[MicroBatch], Tensor], config: Any, device: torch.device, *, packed: bool = False, rounding: float) -> bool:
    """Return True if a model gives the same results for rows that share a prompt as for single rows; tried on the model itself.

    False with a window of attention (rows longer than it would see too much), with layers that carry a state from token to token, or with
    positions that do not come from ``position_ids``. `score` gives the log-probabilities of a micro-batch's action tokens; differences
    up to `rounding`, as a share of that without a mask, are taken for rounding.
    """
    if not attends_to_everything(config):
        return False
    batch = probe_batch(text_part(config)["vocab_size"])
    bundles = share_prompts(batch, budget=batch.num_tokens, hidden_size=PROBE_WIDTH)
    together = Layout(batch).micro_batch(bundles, packed=packed)
    mixed_up = replace(together, segment=None, prompt=None, position_ids=None)
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
        found = score(together.to(device))
    except (TypeError, ValueError, RuntimeError, IndexError):  # a model that takes no such mask says so in one of many ways
        return False
    expected, mixed = score(apart.to(device)), score(mixed_up.to(device))
    # Rows and their action tokens are in the same order each time, because all rows are of one group with one prompt.
    return bool((found - expected).abs().mean() < rounding * (mixed - expected).abs().mean())


def probe(config: Any, *, packed: bool = False) -> MicroBatch:
    """A few rows to try a model of this configuration on."""
    batch = probe_batch(text_part(config)["vocab_size"])
    return Layout(batch).micro_batch(one_row_bundles(batch), packed=packed)


def probe_batch(vocabulary: int, *, prompt: int = 6, sampled: Sequence[int] = (3, 5, 4)) -> Batch:
    """Rows of one group that begin with the same prompt and go on with others; numbers of tokens."""
    answers = [(6 + np.arange(length) * (number + 2)) * 7 % vocabulary for number, length in enumerate(sampled)]
    return batch_of([(np.arange(prompt) * 7 % vocabulary, answers)])


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
