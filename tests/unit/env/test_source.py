"""Order, epochs and cursor of tasks, and tasks that cannot be used."""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from agentrl import Task
from agentrl.core.errors import ConfigError, DataError
from agentrl.env.tasks import PEEK, TaskSource
from agentrl.suites.load import load_agent

HEAD = "from agentrl import AgentInstance, StepResult, Task\nimport itertools\nclass Env(AgentInstance):\n    def step(self, state): ...\n"


def source_of(folder: Path, body: str) -> TaskSource:
    path = folder / "env.py"
    path.write_text(HEAD + body)
    return TaskSource.from_agent(load_agent(str(path)))


def numbered(count: int, **options: Any) -> TaskSource:
    return TaskSource(lambda: [Task(f"prompt {index}") for index in range(count)], origin="test", **options)


def ids(source: TaskSource, count: int) -> list[str]:
    return [source.draw().id for _ in range(count)]


def test_an_epoch_holds_every_task_once_and_the_next_has_another_order() -> None:
    source = numbered(20, seed=1)
    first, second = ids(source, 20), ids(source, 20)
    assert sorted(first) == sorted(second) == sorted(map(str, range(20)))
    assert first != second
    assert first != ids(numbered(20, seed=2), 20)
    assert first == ids(numbered(20, seed=1), 20)


def test_a_drawn_task_knows_its_place() -> None:
    source = numbered(3, shuffle=False)
    drawn = [source.draw() for _ in range(5)]
    assert [(task.id, task.position, task.epoch) for task in drawn] == [("0", 0, 0), ("1", 1, 0), ("2", 2, 0), ("0", 0, 1), ("1", 1, 1)]


@pytest.mark.parametrize("drawn", [0, 1, 7, 10, 23])
def test_a_restored_source_continues_exactly(drawn: int) -> None:
    source = numbered(10, seed=3)
    ids(source, drawn)
    other = numbered(10, seed=3)
    other.restore(json.loads(json.dumps(source.state())))
    assert [other.draw() for _ in range(25)] == [source.draw() for _ in range(25)]


def test_an_endless_iterable_is_taken_in_order_and_can_be_resumed() -> None:
    def endless() -> Iterable[Task]:
        return (Task(f"prompt {index}") for index in itertools.count())

    source = TaskSource(endless, origin="test")
    assert source.num_tasks is None
    assert ids(source, PEEK + 5) == [str(index) for index in range(PEEK + 5)]
    other = TaskSource(endless, origin="test")
    other.restore(source.state())
    assert other.draw().prompt == f"prompt {PEEK + 5}"


def test_a_short_generator_counts_as_finite_and_a_long_one_begins_again() -> None:
    short = TaskSource(lambda: (Task("p") for _ in range(5)), origin="test")
    assert short.num_tasks == 5
    long = TaskSource(lambda: (Task("p") for _ in range(PEEK + 1)), origin="test")
    last = [long.draw() for _ in range(PEEK + 2)][-2:]
    assert [(task.id, task.epoch) for task in last] == [(str(PEEK), 0), ("0", 1)]


def test_first_looks_without_drawing() -> None:
    source = numbered(5)
    assert [task.id for task in source.first(3)] == ["0", "1", "2"]
    assert source.state() == {"epoch": 0, "position": 0}


def test_a_cursor_beyond_the_tasks_is_refused() -> None:
    with pytest.raises(DataError, match="has only 3 tasks"):
        numbered(3).restore({"epoch": 0, "position": 4})


def test_tasks_of_a_class(tmp_path: Path) -> None:
    source = source_of(tmp_path, "    @classmethod\n    def tasks(cls):\n        return [Task('a', 1), Task('b', 2, id='two')]\n")
    assert sorted((task.id, task.label) for task in source.first(5)) == [("0", 1), ("two", 2)]


def test_tasks_may_be_a_plain_list_on_the_class(tmp_path: Path) -> None:
    assert source_of(tmp_path, "    tasks = [Task('a')]\n").num_tasks == 1


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("    @classmethod\n    def tasks(cls): return []\n", "holds no task"),
        ("    @classmethod\n    def tasks(cls): return ['text']\n", "is a str, not a Task"),
        ("    @classmethod\n    def tasks(cls): return [Task('')]\n", "neither text nor a list of messages"),
        ("    @classmethod\n    def tasks(cls): return [Task([{'role': 'user'}])]\n", "neither text nor a list of messages"),
        ("    @classmethod\n    def tasks(cls): return [Task('a', id='x'), Task('b', id='x')]\n", "is also the id of task 0"),
        ("    @classmethod\n    def tasks(cls): return 5\n", "gave a int"),
        ("    @classmethod\n    def tasks(cls): return 1 / 0\n", "ZeroDivisionError"),
        ("    @classmethod\n    def tasks(cls):\n        yield Task('a')\n        1 / 0\n", "at task 1"),
        ("    def tasks(self): return []\n", "@classmethod"),
    ],
)
def test_tasks_that_cannot_be_used(tmp_path: Path, body: str, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        source_of(tmp_path, body)


def test_an_environment_without_tasks_needs_prompts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        source_of(tmp_path, "")
    assert caught.value.field == "--prompts"


def test_an_iterator_that_cannot_begin_again_is_named() -> None:
    once = (Task("p") for _ in range(PEEK))
    source = TaskSource(lambda: once, origin="test")
    ids(source, PEEK)
    with pytest.raises(DataError, match="holds no task"):
        source.draw()
