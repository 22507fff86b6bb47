"""Episodes of a group that share their first turns: one is played from its beginning, the others go on from one of its turns."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.core.types import GroupRequest, Prompt, Task, Turn
from agentrl.env.session import Snapshot
from agentrl.rollout.conversation import Conversation
from agentrl.rollout.episode_plan import ForkSettings

FIRST_TOKENS = 16
"""Tokens at the beginning of a turn by which ``--branch-at entropy`` judges it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForkPoint:
    """An episode as it was before one of its turns."""

    episode_id: str
    number: int  # of that turn
    agent: str  # that writes it
    task: Task
    openings: Mapping[str, Prompt]
    conversations: Mapping[str, Conversation]  # agent -> its own, which nobody goes on with
    logs: Sequence[Mapping[str, float]]
    shown: Sequence[tuple[str, int, Any]]
    snapshots: list[Snapshot]  # of the environment, one for each other episode


class Fork:
    """Hands an episode on to the others of its family, once.

    The root says where it parts, or that it ended before; the others wait for that. Which continuation an episode gets does not matter:
    the states are equal, and each has seeds of its own.
    """

    def __init__(self, settings: ForkSettings) -> None:
        self._settings = settings
        self._point: asyncio.Future[ForkPoint | None] = asyncio.get_running_loop().create_future()
        self._first = 0.0  # mean surprise at the beginning of the first turn

    @property
    def others(self) -> int:
        """Episodes that wait for the root."""
        return self._settings.branches - 1

    def is_at(self, turn: Turn) -> bool:
        """Return True if the episode parts before this turn of the root, which has just been sampled; each is asked for in order."""
        if self._settings.at != "entropy":
            return turn.number == self._settings.at and not self._point.done()
        surprise = -float(turn.logprobs[:FIRST_TOKENS].mean())
        if turn.number == 0:
            self._first = surprise
        return turn.number > 0 and surprise > self._first + self._settings.entropy and not self._point.done()

    def part(self, point: ForkPoint) -> None:
        """Let the others begin."""
        self._point.set_result(point)

    def end(self) -> None:
        """Say that the root is over: if it has not parted, the others are played from their beginning."""
        if not self._point.done():
            self._point.set_result(None)

    async def point(self) -> ForkPoint | None:
        """Return where the root parted; `None` if it did not. Waits for the root's turn; unblocked by `part` and `end`."""
        # Shielded: an episode that is cancelled must not cancel the future for which the others wait.
        return await asyncio.shield(self._point)

    def close(self) -> None:
        """Release the states that no episode took."""
        point = self._point.result() if self._point.done() and not self._point.cancelled() else None
        for snapshot in point.snapshots if point is not None else ():
            snapshot.discard()


@dataclass(frozen=True, slots=True)
class Role:
    """Part of an episode in a fork: the root, or one of those that go on from it."""

    fork: Fork
    is_root: bool


class Forks:
    """The forks of one group: of `branches` members that follow each other the first is the root."""

    def __init__(self, settings: ForkSettings | None, group_request: GroupRequest) -> None:
        self._roles: dict[int, Role] = {}
        self._forks: list[Fork] = []
        if settings is None or group_request.eval_sampling is not None:
            return
        for first in range(0, group_request.n_samples_per_prompt, settings.branches):
            fork = Fork(settings)
            self._forks.append(fork)
            self._roles |= {first + place: Role(fork, place == 0) for place in range(settings.branches)}

    def role(self, index: int) -> Role | None:
        """Return the part of a member; `None` if it has none, as the greedy episode behind the members."""
        return self._roles.get(index)

    def close(self) -> None:
        """Release what no episode took; the group is over."""
        for fork in self._forks:
            fork.close()
