"""Mixtures of data sets: proportions hold, every set is gone through completely, and any place can be entered."""

from __future__ import annotations

from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.core.types import Task
from agentrl.env.prompts import PromptSet
from agentrl.env.tasks import TaskOrder, TaskSource, shares
from agentrl.flow.checkpoint import Progress, repeated_tasks
from agentrl.flow.queue import Admissions

parts = st.lists(st.tuples(st.integers(1, 12), st.floats(0.05, 5.0)), min_size=2, max_size=4)


def order_of(mixture: list[tuple[int, float]], seed: int = 0) -> TaskOrder:
    return TaskOrder([size for size, _ in mixture], [weight for _, weight in mixture], seed=seed)


def source_of(mixture: list[tuple[int, float]], seed: int, holdout: int = 0) -> TaskSource:
    sets = [PromptSet(str(i), [Task("p", id=f"{i}/{j}") for j in range(size)]) for i, (size, _) in enumerate(mixture)]
    return TaskSource.from_prompts(sets, weights=[weight for _, weight in mixture], seed=seed, holdout=holdout)


@given(mixture=parts, seed=st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_proportions_hold_and_every_pass_over_a_part_is_complete(mixture: list[tuple[int, float]], seed: int) -> None:
    order = order_of(mixture, seed)
    sizes, total = [size for size, _ in mixture], sum(weight for _, weight in mixture)
    part_of = [part for part, size in enumerate(sizes) for _ in range(size)]
    drawn: list[list[int]] = [[] for _ in mixture]
    number = 0
    for epoch in range(12):
        indices = order.epoch(epoch)
        assert len(set(indices)) == len(indices) > 0
        for index in indices:
            drawn[part_of[index]].append(index)
            number += 1
            for part, (_, weight) in enumerate(mixture):
                assert abs(len(drawn[part]) - number * weight / total) < len(mixture)
    for part, size in enumerate(sizes):
        for start in range(0, len(drawn[part]) - size + 1, size):
            assert sorted(drawn[part][start : start + size]) == [i for i, other in enumerate(part_of) if other == part]


@given(mixture=parts, epochs=st.lists(st.integers(0, 15), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_epochs_can_be_asked_for_in_any_order(mixture: list[tuple[int, float]], epochs: list[int]) -> None:
    order = order_of(mixture)
    in_turn = list(map(order_of(mixture).epoch, range(16)))
    assert [order.epoch(epoch) for epoch in epochs] == [in_turn[epoch] for epoch in epochs]


@given(mixture=parts, seed=st.integers(0, 5), admitted=st.integers(0, 60), data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_resumed_mixture_neither_skips_nor_repeats(
    mixture: list[tuple[int, float]], seed: int, admitted: int, data: st.DataObject
) -> None:
    uninterrupted = list(islice(source_of(mixture, seed), admitted + 20))
    assert len({(task.id, task.epoch) for task in uninterrupted}) == len(uninterrupted)  # what sampling seeds are made of
    admissions = Admissions(source_of(mixture, seed), Progress())
    for _ in range(admitted):
        admissions.draw()
    still_open = data.draw(st.sets(st.integers(0, max(0, admitted - 1)), max_size=8)) if admitted else set()
    progress = Progress.from_json(admissions.progress(step=0, in_flight=still_open).to_json())
    again = source_of(mixture, seed)
    repeat = repeated_tasks(again, progress)
    assert repeat == [(group_id, uninterrupted[group_id]) for group_id in sorted(still_open)]
    resumed = Admissions(again, progress, repeat)
    drawn = [(resumed.next_id, resumed.draw()) for _ in range(len(repeat) + 20)]
    assert drawn == [*repeat, *((admitted + i, uninterrupted[admitted + i]) for i in range(20))]


@given(mixture=parts, seed=st.integers(0, 3), data=st.data())
@settings(max_examples=100, deadline=None)
def test_what_is_held_out_of_a_mixture_is_in_its_proportions_and_not_drawn(
    mixture: list[tuple[int, float]], seed: int, data: st.DataObject
) -> None:
    mixture = [(size + 40, weight) for size, weight in mixture]
    held = source_of(mixture, seed, count := data.draw(st.integers(0, 40))).held_out
    weights = [weight for _, weight in mixture]
    assert [sum(task.id.startswith(f"{part}/") for task in held) for part in range(len(mixture))] == shares(count, weights)
    drawn = {task.id for task in islice(source_of(mixture, seed, count), 500)}
    assert drawn.isdisjoint(task.id for task in held)


@given(count=st.integers(0, 100), weights=st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6))
def test_shares_sum_up_and_are_within_one_of_the_exact_ones(count: int, weights: list[float]) -> None:
    parts = shares(count, weights)
    assert sum(parts) == count
    assert all(abs(part - count * weight / sum(weights)) < 1 + 1e-9 for part, weight in zip(parts, weights, strict=True))
