"""Draws of tasks by the pass rates seen so far."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from agentrl import Task
from agentrl.core.errors import ConfigError, DataError
from agentrl.env.sampling import Sampling, TaskSampler
from agentrl.env.tasks import TaskSource

TASKS = [Task(f"prompt {index}", id=str(index), metadata={"level": -index}) for index in range(4)]


def sampler(rule: str = "curriculum", seed: int = 0, tasks: list[Task] = TASKS, **options: Any) -> TaskSampler:
    return TaskSampler(tasks, Sampling(rule=rule, **options), seed)


def told(found: TaskSampler, *scores: tuple[int, list[float]]) -> TaskSampler:
    for group_id, (index, values) in enumerate(scores):
        found.outcome(index, group_id, values)
    found.begin_round()
    return found


SEEN = ((0, [0.0, 0.0]), (1, [1.0, 1.0]), (2, [1.0, 0.0]), (3, [1.0, 1.0, 0.0, 0.0, 0.0]))


def test_a_curriculum_goes_through_all_tasks_the_easiest_first() -> None:
    found = told(sampler(), *SEEN)
    assert [found.draw() for _ in range(4)] == [(1, 0), (2, 0), (3, 0), (0, 0)]
    found.outcome(0, 9, [1.0] * 40)
    assert [found.draw()[1] for _ in range(4)] == [1] * 4
    found.begin_round()
    assert found.draw() == (0, 2)


def test_a_curriculum_goes_on_with_what_was_not_drawn_yet() -> None:
    found = told(sampler(), *SEEN)
    begun = [found.draw() for _ in range(2)]
    found.begin_round()
    assert [*begun, *(found.draw() for _ in range(3))] == [(1, 0), (2, 0), (3, 0), (0, 0), (1, 1)]


def test_a_curriculum_begins_with_the_difficulty_that_tasks_state() -> None:
    found = sampler(difficulty_key="level")
    assert [found.draw()[0] for _ in range(4)] == [3, 2, 1, 0]
    with pytest.raises(DataError, match="leave out `:rank`"):
        sampler(difficulty_key="rank")


def test_without_a_difficulty_the_first_pass_has_an_order_of_the_seed() -> None:
    tasks = [Task("x", id=str(index)) for index in range(30)]
    first, again, other = (sampler(seed=seed, tasks=tasks) for seed in (1, 1, 2))
    drawn = [[one.draw()[0] for _ in range(30)] for one in (first, again, other)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert sorted(drawn[0]) == sorted(drawn[2]) == list(range(30)) != drawn[0]


@pytest.mark.parametrize("rule", ["failures", "learnability"])
def test_a_priority_draws_in_proportion_and_a_share_of_all(rule: str) -> None:
    """The rates are (0.5 + successes) / (1 + attempts)."""
    rates = np.array([0.5 / 3, 2.5 / 3, 1.5 / 3, 2.5 / 6])
    priority = {"failures": 1 - rates, "learnability": rates * (1 - rates)}[rule]
    expected = 0.8 * priority / priority.sum() + 0.2 / 4
    found = told(sampler(rule, exploration=0.2), *SEEN)
    assert found.rates() == pytest.approx(rates)
    counts, rounds = Counter[int](), 4000
    for _ in range(rounds):
        counts[found.draw()[0]] += 1
        found.begin_round()
    assert [counts[index] / rounds for index in range(4)] == pytest.approx(expected, abs=4 * (0.25 / rounds) ** 0.5)


def test_no_task_is_drawn_twice_in_a_round_that_has_others() -> None:
    found = told(sampler("learnability"), *SEEN)
    assert sorted(found.draw() for _ in range(8)) == [(index, times) for index in range(4) for times in range(2)]


def test_each_pass_within_a_round_has_an_order_of_its_own() -> None:
    found = sampler("failures", tasks=[Task("x", id=str(index)) for index in range(30)])
    passes = [[found.draw()[0] for _ in range(30)] for _ in range(3)]
    assert [sorted(one) for one in passes] == [list(range(30))] * 3
    assert passes[0] != passes[1] != passes[2] != passes[0]


def test_what_was_seen_before_counts_half() -> None:
    found = told(told(sampler(), (0, [1.0] * 8)), (0, [0.0] * 4), (0, []))
    assert found.rates()[0] == pytest.approx((0.5 * 8 + 0.5) / (0.5 * 8 + 4 + 1))
    assert found.metrics() == {"tasks/tried": 0.25, "tasks/pass_rate": pytest.approx(4.5 / 9)}


def test_timing_within_a_round_decides_nothing() -> None:
    news = [(0, 3, [0.1, 0.2]), (0, 1, [0.7]), (2, 2, [0.3])]
    states = []
    for order in itertools.permutations(news):
        found = sampler("failures")
        assert sorted(found.draw()[0] for _ in range(4)) == list(range(4))
        for index, group_id, scores in order:
            found.outcome(index, group_id, scores)
        assert (found.rates() == 0.5).all()
        found.begin_round()
        states.append(found.state())
    assert states == states[:1] * 6


@pytest.mark.parametrize("rule", ["curriculum", "failures", "learnability"])
def test_a_restored_sampler_goes_on_exactly(rule: str) -> None:
    def step(found: TaskSampler, number: int) -> list[tuple[int, int]]:
        drawn = [found.draw() for _ in range(3)]
        for place, (index, _) in enumerate(drawn):
            found.outcome(index, 3 * number + place, [0.1 * index, 1.0 / (number + 1)])
        found.begin_round()
        return drawn

    found, again = sampler(rule), sampler(rule)
    for number in range(5):
        step(found, number)
    again.restore(json.loads(json.dumps(found.state())))
    assert [step(again, number) for number in range(5, 20)] == [step(found, number) for number in range(5, 20)]
    again.restore({})
    assert step(again, 0) == step(sampler(rule), 0)


def test_a_source_draws_what_the_sampler_says_and_finds_it_again() -> None:
    source = TaskSource(lambda: TASKS, origin="test", sampling=Sampling(rule="curriculum", difficulty_key="level"))
    drawn = [source.draw() for _ in range(5)]
    assert [(task.id, task.position, task.epoch) for task in drawn[:4]] == [("3", 3, 0), ("2", 2, 0), ("1", 1, 0), ("0", 0, 0)]
    assert [source.at(task.position, task.epoch) for task in drawn] == drawn
    with pytest.raises(DataError, match="that the run began with"):
        source.at(4, 0)


def test_an_endless_collection_is_refused() -> None:
    with pytest.raises(ConfigError, match="--task-sampling"):
        TaskSource(lambda: (Task(str(i)) for i in itertools.count()), origin="test", sampling=Sampling(rule="failures"))
