"""The reward that sees a whole group, given when its episodes have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentrl.algo.group_rewards import GroupAnswer, GroupAnswers, find_group_reward
from agentrl.core.errors import AgentRLError
from agentrl.core.process import on_thread
from agentrl.core.types import Group, Status, Trajectory
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.step_rewards import with_reward

METRIC = "group_reward"
"""Name of the reward among an episode's metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewardSettings:
    """Name or file of the reward, its weight, and its deadline; True if it takes the place of the environment's."""

    name: str
    weight: float = 1.0
    replaces: bool = False
    timeout_s: float = 45.0


class GroupRewards:
    """Adds the reward of ``--group-reward`` to groups; one per rollout worker.

    Each trained agent's trajectories that ended well are judged together, on a thread. The reward is that of the last trained turn, and
    the environment's score stays what it was. A function that fails makes failed episodes, never a reward of 0.
    """

    def __init__(self, settings: GroupRewardSettings) -> None:
        self._settings, self._function = settings, find_group_reward(settings.name)

    async def judge(self, group: Group, codec: ChatCodec) -> Group:
        """Return the group with its rewards; if the function fails, with the status of a failure in place of what it should have judged."""
        places: dict[str, list[int]] = {}
        for place, trajectory in enumerate(group.trajectories):
            if trajectory.status.trainable and not trajectory.frozen and _last_trained(trajectory) is not None:
                places.setdefault(trajectory.agent, []).append(place)
        judged = list(group.trajectories)
        for agent, own in places.items():
            for place, trajectory in zip(own, await self._judged(group, agent, [judged[place] for place in own], codec), strict=True):
                judged[place] = trajectory
        return replace(group, trajectories=tuple(judged))

    async def _judged(self, group: Group, agent: str, trajectories: Sequence[Trajectory], codec: ChatCodec) -> list[Trajectory]:
        answers = GroupAnswers(task=group.task, agent=agent, answers=tuple(_answer(trajectory, codec) for trajectory in trajectories))
        limit = self._settings.timeout_s
        try:
            async with asyncio.timeout(limit):
                values = await on_thread(self._function, answers)
        except TimeoutError:
            problem = f"{self._settings.name} gave no rewards within {limit:g} s (--group-reward, --reward-timeout-s)"
            return [_failed(trajectory, Status.TIMEOUT, problem) for trajectory in trajectories]
        except AgentRLError as error:
            return [_failed(trajectory, Status.ENV_ERROR, str(error)) for trajectory in trajectories]
        return [self._rewarded(trajectory, value) for trajectory, value in zip(trajectories, values, strict=True)]

    def _rewarded(self, trajectory: Trajectory, value: float) -> Trajectory:
        paid, keeps, last = self._settings.weight * value, not self._settings.replaces, _last_trained(trajectory)
        turns = tuple(
            with_reward(turn, (turn.reward if keeps else 0.0) + (paid if place == last else 0.0), float(keeps))
            for place, turn in enumerate(trajectory.turns)
        )
        return replace(
            trajectory,
            turns=turns,
            reward=(trajectory.reward or 0.0) * keeps + paid,
            reward_parts={**trajectory.reward_parts, "group": paid},
            metrics={**trajectory.metrics, METRIC: value},
        )


def _answer(trajectory: Trajectory, codec: ChatCodec) -> GroupAnswer:
    return GroupAnswer(
        texts=tuple(codec.decode_action(turn.token_ids.tolist()) for turn in trajectory.turns if not turn.masked),
        reward=trajectory.reward or 0.0,
        score=trajectory.score,
        truncated=trajectory.truncated_by_length,
        metrics=trajectory.metrics,
    )


def _last_trained(trajectory: Trajectory) -> int | None:
    return next((place for place in reversed(range(len(trajectory.turns))) if not trajectory.turns[place].masked), None)


def _failed(trajectory: Trajectory, status: Status, error: str) -> Trajectory:
    return replace(trajectory, status=status, reward=None, score=None, error=error)
