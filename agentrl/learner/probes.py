"""Small batches on which a model is tried: it must give rows that share a prompt, or follow each other, the scores that they have alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.core.images import ImageInput, PlacedImage
from agentrl.core.model_shape import attends_to_everything, text_part
from agentrl.core.types import FinishReason, Group, Status, Task, Trajectory, Turn, floats, ints
from agentrl.learner.batch import Batch, collate
from agentrl.learner.layout import Ints, Layout, MicroBatch
from agentrl.learner.trees import one_row_bundles, share_prefixes

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


def probe_batch(vocabulary: int, *, prompt: int = 6, sampled: Sequence[int] = (3, 5, 4), images: Sequence[ImageInput] = ()) -> Batch:
    """Rows of one group that begin with the same prompt, each answer with a third of the one before; numbers of tokens.

    `images` are as in `batch_of`.
    """
    answers = [(6 + np.arange(length) * (number + 2)) * 7 % vocabulary for number, length in enumerate(sampled)]
    return batch_of([(np.arange(prompt) * 7 % vocabulary, branching(answers))], images)


def branching(answers: Sequence[Ints]) -> list[Ints]:
    """Return the answers, each but the first with a third of the one before at its beginning."""
    found: list[Ints] = []
    for answer in answers:
        common = min(len(answer), len(found[-1])) // 3 if found else 0
        found.append(np.concatenate([found[-1][:common], answer[common:]]) if common else answer)
    return found


def batch_of(groups: Sequence[tuple[Ints, Sequence[Ints]]], images: Sequence[ImageInput] = ()) -> Batch:
    """Rows of groups, each with the token ids of its prompt and of the answers to it, to try a model on.

    With `images`, one is in the middle of each prompt, and another between two halves of each answer but the first.
    """
    return collate([_group(number, prompt, answers, images) for number, (prompt, answers) in enumerate(groups)])


def _group(number: int, prompt: Ints, answers: Sequence[Ints], images: Sequence[ImageInput]) -> Group:
    names = [f"{number}-{member}" for member in range(len(answers))]
    trajectories = tuple(
        Trajectory(
            trajectory_id=name,
            episode_id=name,
            group_id=number,
            turns=_turns(prompt, answer, images[number % len(images) :] if images else (), again=member > 0),
            status=Status.FINISHED,
            reward=0.0,
        )
        for member, (name, answer) in enumerate(zip(names, answers, strict=True))
    )
    return Group(group_id=number, task=Task(""), trajectories=trajectories)


def _turns(prompt: Ints, answer: Ints, images: Sequence[ImageInput], *, again: bool) -> tuple[Turn, ...]:
    if not images:
        return (_turn(prompt, answer),)
    middle, half = len(prompt) // 2, len(answer) // 2
    if not again:
        return (_turn(prompt, answer, PlacedImage(middle, images[0])),)
    first = _turn(prompt, answer[:half], PlacedImage(middle, images[0]))
    return first, _turn(prompt[:2], answer[half:], PlacedImage(1, images[-1]))


def _turn(prompt: Ints, answer: Ints, *placed: PlacedImage) -> Turn:
    for each in placed:
        prompt = np.concatenate([prompt[: each.place], each.image.token_ids, prompt[each.place :]])
    return Turn(
        prompt_ids=ints(prompt.tolist()),
        token_ids=ints(answer.tolist()),
        logprobs=floats([0.0] * len(answer)),
        versions=ints([0] * len(answer)),
        finish_reason=FinishReason.STOP,
        images=placed,
    )
