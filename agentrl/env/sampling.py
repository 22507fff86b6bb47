"""Order of tasks that follows the pass rates seen so far: a curriculum, or draws in proportion to a priority."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.core.errors import DataError
from agentrl.core.types import Task, derive_seed

Rates = npt.NDArray[np.float64]

MEMORY = 0.5
"""Weight of what was seen of a task before, each time that it is tried again: the policy has changed since."""

PRIORITIES: Mapping[str, Callable[[Rates], Rates]] = MappingProxyType(
    {"failures": lambda rates: 1.0 - rates, "learnability": lambda rates: rates * (1.0 - rates)}
)
"""Priority of a task by its pass rate: Kimi k1.5's (arXiv:2501.12599, section 2.3.4), and the variance of a success (arXiv:2502.12272)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of a `TaskSampler`."""

    rule: str  # ``curriculum``, or a key of `PRIORITIES`
    exploration: float = 0.1  # share of the draws that goes to all tasks alike, so that no pass rate stays unknown
    difficulty_key: str = ""  # number in a task's metadata by which the curriculum orders tasks of the same pass rate, the smallest first


class TaskSampler:
    """Draws from N tasks, in rounds; a step of training begins a new one.

    The order of a round follows from the seed, its number, and what was known when it began. `curriculum` draws the tasks that were
    drawn least often, those with the highest pass rate first, so that all tasks come once before one comes again. A priority draws
    without replacement within a round, with probabilities in proportion to it (Efraimidis and Spirakis, 2006). What becomes known during
    a round counts from the next on, whatever the order in which it becomes known, so that timing within a step decides nothing.
    """

    def __init__(self, tasks: Sequence[Task], sampling: Sampling, seed: int) -> None:
        self._sampling, self._seed, self._round = sampling, seed, 0
        self._drawn = np.zeros(len(tasks), dtype=np.int64)
        self._tried, self._passed = np.zeros(len(tasks)), np.zeros(len(tasks))
        self._difficulty = np.array([_number(task, sampling.difficulty_key) for task in tasks])
        self._order: Sequence[int] = ()
        self._place = 0
        self._news: list[tuple[int, int, list[float]]] = []  # group, task, scores

    def draw(self) -> tuple[int, int]:
        """Return the index of the next task, and how often it was drawn before."""
        if self._place == len(self._order):
            self._round += bool(self._order)
            self._order, self._place = self._rank(), 0
        index = int(self._order[self._place])
        self._place += 1
        self._drawn[index] += 1
        return index, int(self._drawn[index]) - 1

    def outcome(self, index: int, group_id: int, scores: Sequence[float]) -> None:
        """Note the scores, in 0..1, of a group's episodes; they count from the next round on."""
        if scores:
            self._news.append((group_id, index, list(scores)))

    def begin_round(self) -> None:
        """Let all that is known count, and draw in a new order."""
        # By group: a sum with weights depends on the order, and that of arrival differs from run to run.
        for _, index, scores in sorted(self._news):
            self._tried[index] = MEMORY * self._tried[index] + len(scores)
            self._passed[index] = MEMORY * self._passed[index] + math.fsum(scores)
        self._news.clear()
        self._round, self._order, self._place = self._round + 1, (), 0

    def rates(self) -> Rates:
        """Return the estimated pass rate of each task, 0.5 where nothing is known. # [N]."""
        return (self._passed + 0.5) / (self._tried + 1.0)

    def metrics(self) -> dict[str, float]:
        """Return the share of the tasks that were tried, and the mean estimate of their pass rates."""
        tried = self._tried > 0
        rates = {"tasks/pass_rate": float(self.rates()[tried].mean())} if tried.any() else {}
        return {"tasks/tried": float(tried.mean()), **rates}

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs to go on with the next round, in JSON's own types; only the tasks drawn so far take room."""
        drawn = np.flatnonzero(self._drawn).tolist()
        tasks = {str(i): [int(self._drawn[i]), float(self._tried[i]), float(self._passed[i])] for i in drawn}
        return {"round": self._round, "tasks": tasks}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned at the beginning of a round; the very beginning if it is empty."""
        self._round, self._order, self._place = int(state.get("round", 0)), (), 0
        for numbers in (self._drawn, self._tried, self._passed):
            numbers.fill(0)
        for index, (drawn, tried, passed) in state.get("tasks", {}).items():
            self._drawn[int(index)], self._tried[int(index)], self._passed[int(index)] = drawn, tried, passed

    def _rank(self) -> list[int]:
        draws = np.random.default_rng(derive_seed(self._seed, "tasks", self._round)).standard_exponential(len(self._drawn))
        rates = self.rates()
        if self._sampling.rule == "curriculum":
            found: list[int] = np.lexsort((draws, self._difficulty, -rates, self._drawn)).tolist()
            return found
        priority = PRIORITIES[self._sampling.rule](rates)
        share = self._sampling.exploration
        # The sum is never 0, since estimates lie strictly between 0 and 1.
        chances = (1.0 - share) * priority / priority.sum() + share / len(rates)
        ranked: list[int] = np.argsort(draws / chances, kind="stable").tolist()
        return ranked


def _number(task: Task, key: str) -> float:
    """Return a number of a task's metadata, 0 without a key; `DataError` if it has none."""
    if not key:
        return 0.0
    value = task.metadata.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"metadata[{key!r}]", value, f"of task {task.id} is no number", f"Give each task one, or leave out `:{key}`.")
    return float(value)
