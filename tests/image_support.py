"""Groups of episodes with images, as rollout workers make them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from agentrl.core.images import ImageInput, PlacedImage
from agentrl.core.protocols import Engine, GenerationRequest, TokenListener
from agentrl.core.types import FinishReason, Generation, Group, Sampling, Status, Task, Trajectory, Turn, floats, ints
from agentrl.env.plan import ImageConfig
from agentrl.learner.batch import collate
from agentrl.learner.layout import Layout
from agentrl.learner.models import PolicyModel
from agentrl.learner.trees import one_row_bundles
from agentrl.rollout.images import ImageReader, open_reader


def picture(seed: int, side: int = 64) -> np.ndarray[Any, Any]:
    """Noise in three colours."""
    return np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)


def reader_of(model: str) -> ImageReader:
    """The reader of a model's images."""
    found = open_reader(model, ImageConfig())
    assert found is not None
    return found


def read(reader: ImageReader, *seeds: int) -> list[ImageInput]:
    """Pictures as the model reads them."""
    return asyncio.run(reader.read([picture(seed) for seed in seeds]))


def turn(reader: ImageReader, compact: list[int], images: list[ImageInput], sampled: list[int]) -> Turn:
    """A turn whose prompt is the expanded form of `compact`."""
    ids, placed = reader.expand(compact, images)
    return Turn(
        prompt_ids=ints(ids),
        token_ids=ints(sampled),
        logprobs=floats([-3.0] * len(sampled)),
        versions=ints([0] * len(sampled)),
        finish_reason=FinishReason.STOP,
        images=placed,
    )


def group_with_images(reader: ImageReader, number: int = 0, members: int = 3, *, own_first: bool = False) -> Group:
    """A group whose members begin with the same picture, or with `own_first` each with its own, and have others in a later turn."""
    mark = reader.placeholder
    trajectories = []
    for member in range(members):
        name = f"{number}-{member}"
        first = read(reader, 100 * number + (member if own_first else 0))
        later = read(reader, 100 * number + 50 + member)
        turns = (
            turn(reader, [3, mark, 20, 30, 1, 4], first, [40 + member, 50]),
            turn(reader, [1, 3, 21, mark, 4], later, [60, 1 + member]),
        )
        reward = float(member % 2)
        trajectories.append(
            Trajectory(trajectory_id=name, episode_id=name, group_id=number, turns=turns, status=Status.FINISHED, reward=reward)
        )
    return Group(group_id=number, task=Task("x"), trajectories=tuple(trajectories))


def group_of_text(number: int, members: int = 3) -> Group:
    """A group without images."""
    trajectories = []
    for member in range(members):
        name = f"{number}-{member}"
        own = Turn(
            prompt_ids=ints([3, 20, 21, 4]),
            token_ids=ints([30 + member, 1]),
            logprobs=floats([-3.0, -3.0]),
            versions=ints([0, 0]),
            finish_reason=FinishReason.STOP,
        )
        reward = float(member % 2)
        trajectories.append(
            Trajectory(trajectory_id=name, episode_id=name, group_id=number, turns=(own,), status=Status.FINISHED, reward=reward)
        )
    return Group(group_id=number, task=Task("x"), trajectories=tuple(trajectories))


def moved(placed: tuple[PlacedImage, ...], by: int) -> tuple[PlacedImage, ...]:
    """The same images in a prompt that begins earlier."""
    return tuple(each.moved(by) for each in placed)


class Player:
    """Plays episodes of two turns, each with pictures."""

    def __init__(self, engine: Engine, reader: ImageReader, name: str) -> None:
        self.engine, self.reader, self.name = engine, reader, name

    async def sample(
        self,
        episode: int,
        number: int,
        ids: Sequence[int],
        placed: Sequence[PlacedImage],
        max_tokens: int = 8,
        on_tokens: TokenListener | None = None,
    ) -> Generation:
        return await self.engine.generate(
            GenerationRequest(
                request_id=f"{self.name}-{episode}-{number}",
                prompt_ids=ints(list(ids)),
                sampling=Sampling(max_tokens=max_tokens, seed=episode),
                session=f"{self.name}-{episode}",
                placed=tuple(placed),
                on_tokens=on_tokens,
            )
        )

    async def play(self, episode: int, last_tokens: int = 8, on_tokens: TokenListener | None = None) -> Trajectory:
        """Play an episode; `on_tokens` is called during its last turn, of at most `last_tokens`."""
        mark, reader = self.reader.placeholder, self.reader
        first, second, third = await reader.read([picture(episode % 2), picture(7), picture(episode + 10)])
        ids, placed = reader.expand([3, mark, *range(20, 60), mark, 20 + episode, 1, 4], [first, second])
        one = await self.sample(episode, 0, ids, placed)
        before = [*ids, *one.token_ids.tolist()]
        new, later = reader.expand([1, 3, mark, 40, 1, 4], [third])
        images = [*placed, *(each.moved(len(before)) for each in later)]
        two = await self.sample(episode, 1, [*before, *new], images, last_tokens, on_tokens)
        turns = (_turn(ids, one, placed), _turn(new, two, later))
        name = f"{self.name}-{episode}"
        return Trajectory(trajectory_id=name, episode_id=name, group_id=0, turns=turns, status=Status.FINISHED, reward=0.0)


def _turn(ids: Sequence[int], generation: Generation, placed: tuple[PlacedImage, ...]) -> Turn:
    return Turn(
        prompt_ids=ints(list(ids)),
        token_ids=generation.token_ids,
        logprobs=generation.logprobs,
        versions=generation.versions,
        finish_reason=generation.finish_reason,
        images=placed,
    )


@torch.no_grad()
def mismatch(trajectories: Sequence[Trajectory], model: Any, version: int | None = None) -> float:
    """Largest difference between the log-probabilities of the episodes and the learner's, of tokens that a `version` sampled or of all."""
    batch = collate([Group(group_id=0, task=Task("x"), trajectories=tuple(trajectories))])
    micro = Layout(batch).micro_batch(one_row_bundles(batch), packed=False)
    found, _, _ = PolicyModel(model)(micro)
    differences = (found - batch.logprobs[micro.actions]).abs()
    return float(differences.max() if version is None else differences[batch.versions[micro.actions] == version].max())
