"""Tasks of a resumed run: what was added comes behind what was there, and what is gone or changed is named."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from agentrl import Task
from agentrl.core.errors import DataError
from agentrl.env.known_tasks import KnownTasks, digest_of
from agentrl.env.sampling import Sampling
from agentrl.env.tasks import TaskSource


def tasks(count: int) -> list[Task]:
    return [Task(f"prompt {index}", index, id=f"t{index}", metadata={"level": index}) for index in range(count)]


def source(given: Sequence[Task], known: KnownTasks | None = None, **options: Any) -> TaskSource:
    kept = None if known is None else KnownTasks.from_json(json.loads(json.dumps(known.to_json())))
    return TaskSource(lambda: given, origin="data.jsonl", seed=3, known=kept, **options)


def epoch(source: TaskSource, number: int) -> list[str]:
    """The tasks of an epoch, as a source draws them that is put at its beginning."""
    source.restore({"epoch": number, "position": 0})
    drawn = []
    while (task := source.draw()).epoch == number:
        drawn.append(task.id)
    return drawn


def test_the_same_tasks_are_drawn_and_held_out_as_before() -> None:
    first = source(tasks(20), holdout=4)
    again = source(tasks(20), first.known, holdout=4, epoch=1)
    assert [epoch(again, number) for number in range(3)] == [epoch(first, number) for number in range(3)]
    assert again.held_out == first.held_out
    assert (again.known.digests, again.known.held_out, again.num_added) == (first.known.digests, first.known.held_out, 0)


def test_tasks_in_another_order_are_drawn_as_before() -> None:
    first = source(tasks(20), holdout=4)
    again = source([*reversed(tasks(20))], first.known, holdout=4)
    assert (epoch(again, 0), again.held_out) == (epoch(first, 0), first.held_out)


def test_tasks_that_were_added_begin_with_the_next_epoch_and_none_is_held_out() -> None:
    first = source(tasks(20), holdout=4)
    grown = source(tasks(30), first.known, holdout=4, epoch=1)
    assert [epoch(grown, number) for number in (0, 1)] == [epoch(first, number) for number in (0, 1)]
    assert grown.held_out == first.held_out
    assert (grown.num_added, grown.num_tasks) == (10, 26)
    added = {f"t{index}" for index in range(20, 30)}
    assert sorted(epoch(grown, 2)) == sorted({*epoch(first, 0), *added})
    later = source(tasks(30), grown.known, holdout=4, epoch=5)
    assert [epoch(later, number) for number in range(7)] == [epoch(grown, number) for number in range(7)]
    assert later.num_added == 0


def test_what_was_added_twice_in_an_epoch_begins_together() -> None:
    first = source(tasks(8))
    once = source(tasks(10), first.known, epoch=2)
    twice = source(tasks(13), once.known, epoch=2)
    assert twice.known.growth == ((0, 8), (3, 13))
    assert epoch(twice, 2) == epoch(first, 2)
    assert len(epoch(twice, 3)) == 13
    third = source(tasks(14), twice.known, epoch=4)
    assert third.known.growth == ((0, 8), (3, 13), (5, 14))
    assert [len(epoch(third, number)) for number in range(6)] == [8, 8, 8, 13, 13, 14]


@pytest.mark.parametrize("gone", [1, 9])
def test_tasks_that_are_gone_are_named(gone: int) -> None:
    first = source(tasks(20))
    shown = "t0" if gone == 1 else "t0, t1, t2, t3, t4 and 4 more"
    with pytest.raises(DataError, match=f"{gone} of 20 tasks with which the run began are gone: {shown}. Restore them, or add --accept-ch"):
        source(tasks(20)[gone:], first.known)


@pytest.mark.parametrize(
    "changed",
    [
        Task("prompt 7", 8, id="t7", metadata={"level": 7}),
        Task("prompt 8", 7, id="t7", metadata={"level": 7}),
        Task("prompt 7", 7, id="t7", metadata={"level": 8}),
        Task("prompt 7", 7, id="t7", metadata={"level": 7}, seed=1),
    ],
)
def test_tasks_that_changed_are_named(changed: Task) -> None:
    first = source(tasks(20), holdout=4)
    with pytest.raises(DataError, match="1 of 20 tasks with which the run began are changed: t7"):
        source([*tasks(7), changed, *tasks(20)[8:]], first.known, holdout=4)


def test_objects_count_by_their_type_alone() -> None:
    one, other = object(), object()
    assert digest_of(Task("a", one)) == digest_of(Task("a", other))
    assert digest_of(Task("a", object())) != digest_of(Task("a", None))


def test_a_mixture_keeps_its_order_and_cannot_grow() -> None:
    options: dict[str, Any] = {"mixture": [(10, 0.7), (10, 0.3)], "holdout": 4}
    first = source(tasks(20), **options)
    again = source([*reversed(tasks(20))], first.known, epoch=1, **options)
    assert [epoch(again, number) for number in range(3)] == [epoch(first, number) for number in range(3)]
    assert again.held_out == first.held_out
    with pytest.raises(DataError, match="has 1 tasks that were added since the run began, and --prompt-probs fixes"):
        source(tasks(21), first.known, mixture=[(11, 0.7), (10, 0.3)], holdout=4)


def test_a_sampler_goes_on_with_what_it_knows() -> None:
    sampling = Sampling(rule="curriculum")
    first = source(tasks(4), sampling=sampling)
    assert first.sampler is not None
    drawn = [first.draw().id for _ in range(4)]
    first.sampler.begin_round()
    state = first.sampler.state()
    grown = source(tasks(6), first.known, sampling=sampling)
    assert grown.sampler is not None
    grown.sampler.restore(state)
    assert sorted(drawn) == ["t0", "t1", "t2", "t3"]
    assert {grown.draw().id for _ in range(2)} == {"t4", "t5"}  # each task once before one comes again


def test_the_first_tasks_of_an_endless_iterable_are_compared() -> None:
    def endless(word: str = "prompt") -> Iterable[Task]:
        return (Task(f"{word} {index}") for index in itertools.count())

    first = TaskSource(endless, origin="env.py", holdout=2)
    assert not first.known.has_end
    assert TaskSource(endless, origin="env.py", holdout=2, known=first.known).draw().id == first.draw().id
    with pytest.raises(DataError, match="66 of 66 tasks with which the run began are changed"):
        TaskSource(lambda: endless("question"), origin="env.py", holdout=2, known=first.known)
