"""Rewards that see a whole group: ranking, majority vote, diversity, and a user's own. Plain Python, without torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from agentrl.algo import facts
from agentrl.core.types import Task

GroupReward: TypeAlias = Callable[["GroupAnswers"], Sequence[float]]
"""From the answers of a group to a reward for each of them, in the same order."""

_FINAL = re.compile(r"\\boxed\{([^{}]*)\}|<answer>(.*?)</answer>|^#### *(.+)$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAnswer:
    """One episode of a group that ended well.

    Attributes:
        texts: Texts that the policy wrote, turn by turn, without the tokens that end turns.
        reward: Reward of the environment.
        score: Score of the environment, 0 to 1; `None` where there is none.
        truncated: True if a limit ended the last turn.
        metrics: Numbers that the environment logged.
    """

    texts: tuple[str, ...]
    reward: float = 0.0
    score: float | None = None
    truncated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Text that the policy wrote last."""
        return self.texts[-1] if self.texts else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAnswers:
    """The episodes of one task that ended well, of one agent where there are several.

    Attributes:
        task: The task.
        answers: The episodes, in order.
        agent: Name of the agent; empty for a single one.
    """

    task: Task
    answers: tuple[GroupAnswer, ...]
    agent: str = ""


@facts.group_reward
def majority(group: GroupAnswers) -> list[float]:
    r"""Pay 1 for the most frequent final answer, which needs no label (TTRL, arXiv:2504.16084); of equally frequent ones the first counts.

    The final answer stands in ``\boxed{}``, in ``<answer>`` or after ``####``, the last of them; without any it is the whole last turn.
    """
    finals = [_final(answer.text) for answer in group.answers]
    winner, _ = Counter(finals).most_common(1)[0]
    return [float(final == winner) for final in finals]


@facts.group_reward
def ranking(group: GroupAnswers) -> list[float]:
    """Pay each episode its rank by the environment's reward, from 0 for the lowest to 1 for the highest; equal rewards share the mean."""
    rewards, last = [answer.reward for answer in group.answers], max(len(group.answers) - 1, 1)
    below = [sum(other < reward for other in rewards) for reward in rewards]
    equal = [rewards.count(reward) - 1 for reward in rewards]
    return [(under + same / 2) / last for under, same in zip(below, equal, strict=True)]


@facts.group_reward
def diversity(group: GroupAnswers) -> list[float]:
    """Pay each episode how far its words are from those of the others: 1 less the mean share of words in common (Jaccard), 0 to 1."""
    words = [frozenset(" ".join(answer.texts).casefold().split()) for answer in group.answers]
    others = max(len(words) - 1, 1)
    shared = [sum(_overlap(own, other) for place, other in enumerate(words) if place != index) for index, own in enumerate(words)]
    return [1 - common / others for common in shared]


GROUP_REWARDS: dict[str, GroupReward] = {"majority": majority, "ranking": ranking, "diversity": diversity}
"""Built-in rewards of groups by name."""


def find_group_reward(name: str) -> GroupReward:
    """Return a built-in reward or the user's own ``file.py:name``, with its values checked; what cannot be used is a `ConfigError`."""
    function = facts.find(facts.GROUP_REWARD, name, GROUP_REWARDS)

    def checked(group: GroupAnswers) -> list[float]:
        with facts.calls(facts.GROUP_REWARD, function):
            values = function(group)
            rewards = [float(value) for value in values]
        if len(rewards) != len(group.answers) or not all(map(math.isfinite, rewards)):
            problem = f"returned {values!r:.200} for task {group.task.id!r} with {len(group.answers)} answers"
            raise facts.unusable(facts.GROUP_REWARD, function, problem, "Return one finite number for each answer, in their order.")
        return rewards

    return checked


def group_reward_facts(name: str) -> facts.GroupRewardFacts:
    """Return the facts of a reward of groups; see `find_group_reward`."""
    found: facts.GroupRewardFacts = facts.facts_of(facts.find(facts.GROUP_REWARD, name, GROUP_REWARDS))
    return found


def _final(text: str) -> str:
    found = [next(part for part in match.groups() if part is not None) for match in _FINAL.finditer(text)]
    return " ".join((found[-1] if found else text).casefold().split())


def _overlap(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / len(one | other) if one or other else 1.0
