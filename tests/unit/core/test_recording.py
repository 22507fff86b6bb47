"""The account of recorded episodes: whole groups from the beginning to the end of a run, within its budget."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.recording import RecordBudget


def played(
    budget: RecordBudget, *, steps: int, groups: int, samples: int, size: int, in_flight: int = 0, first_step: int = 0
) -> list[list[int]]:
    """The episodes that are recorded of each group of each step; `in_flight` groups begin before the first of them ends."""
    waiting: deque[tuple[int, int]] = deque()
    recorded: list[list[int]] = []

    def end() -> None:
        group, episodes = waiting.popleft()
        budget.settle(group, episodes=episodes, played=samples, size=episodes * size)

    for step in range(first_step, steps):
        recorded.append([])
        for number in range(groups):
            waiting.append((step * groups + number, budget.promise(step * groups + number, step + 1)))
            recorded[-1].append(waiting[-1][1])
            while len(waiting) > in_flight:
                end()
    while waiting:
        end()
    return recorded


def made(mib: float, *, steps: int, samples: int = 8, guess: float = 1000) -> RecordBudget:
    return RecordBudget(samples=samples, least=1, budget_bytes=mib * 2**20, num_steps=steps, episode_bytes=guess)


def test_a_small_run_is_recorded_whole() -> None:
    budget = made(8, steps=60)
    assert played(budget, steps=60, groups=16, samples=8, size=1000, in_flight=32) == [[8] * 16] * 60
    assert budget.to_json() == {"episodes": 7680, "played": 7680, "bytes": 7_680_000}


@pytest.mark.parametrize("in_flight", [0, 16, 64])
def test_a_large_run_has_whole_groups_in_each_part_and_keeps_to_its_budget(in_flight: int) -> None:
    budget = made(10, steps=100, guess=2500)
    recorded = played(budget, steps=100, groups=16, samples=8, size=3000, in_flight=in_flight)
    whole = [sum(count == 8 for count in step) for step in recorded]
    assert {count for step in recorded for count in step} == {1, 8}
    tenths = [sum(whole[start : start + 10]) for start in range(0, 100, 10)]
    assert min(tenths) >= 15, tenths
    assert max(tenths[1:]) - min(tenths[1:]) <= 5, tenths
    assert 0.95 < budget.bytes / (10 * 2**20) < 1.01


def test_one_episode_of_each_group_is_recorded_whatever_it_takes() -> None:
    budget = made(1, steps=50, guess=200_000)
    assert played(budget, steps=50, groups=4, samples=8, size=200_000) == [[1] * 4] * 50


def test_what_a_step_leaves_the_next_ones_have() -> None:
    budget = made(10, steps=10)
    played(budget, steps=5, groups=4, samples=8, size=1000)
    assert played(budget, steps=6, groups=16, samples=8, size=20_000, first_step=5) == [[8] * 16]


@given(st.integers(1, 30), st.integers(0, 60), st.integers(100, 50_000))
def test_a_run_that_goes_on_has_the_account_that_it_had(stopped: int, in_flight: int, size: int) -> None:
    """Groups in flight when a run is killed are given up; the account is then that of the groups that ended."""
    one, two = made(5, steps=30), made(5, steps=30)
    played(one, steps=stopped, groups=8, samples=8, size=size, in_flight=in_flight)
    one.promise(10_000, stopped)
    one.forget((10_000,))
    two.restore(episodes=one.episodes, played=one.played, size=one.bytes)
    rest = {"steps": 30, "groups": 8, "samples": 8, "size": size, "in_flight": in_flight, "first_step": stopped}
    assert played(one, **rest) == played(two, **rest)
    assert one.to_json() == two.to_json()


def test_without_a_budget_the_number_is_fixed() -> None:
    for least in (0, 1, 8):
        budget = RecordBudget(samples=8, least=least)
        assert [budget.promise(group, 1) for group in range(3)] == [least] * 3
