import itertools

import pytest

from agentrl.env.load import load_agent
from tests.unit.envs.play import load, play

pytest.importorskip("reasoning_gym", exc_type=ImportError)

Reasoning = load("reasoning")


def test_the_answer_counts_to_the_letter():
    for task in itertools.islice(Reasoning.tasks(), 50):
        number = int(task.prompt.rstrip("?").rpartition(" ")[2])
        assert task.label == str(number.bit_count())
        (result,) = play(Reasoning, task, f" {task.label}\n")
        assert (result.reward, result.terminated) == (1.0, True)
        for answer in ("", f"1{task.label}", f"{task.label} or 9", f"It is {task.label}."):
            assert play(Reasoning, task, answer)[0].reward == 0.0


def test_there_is_no_end_of_tasks_and_each_has_its_number():
    first, again = (list(itertools.islice(Reasoning.tasks(), 600)) for _ in range(2))
    assert [(task.prompt, task.label) for task in first] == [(task.prompt, task.label) for task in again]
    assert [task.id for task in first[:2]] == ["count_bits-0", "count_bits-1"]
    assert len({task.prompt for task in first}) == 63


def test_the_file_asks_what_the_specification_in_its_docstring_asks():
    cls = load_agent("reasoning-gym:count_bits?max_n=63&ask=").load()
    asked = [cls.make_item(seed) for seed in range(20)]
    assert [(item["question"], item["answer"]) for item in asked] == [(t.prompt, t.label) for t in itertools.islice(Reasoning.tasks(), 20)]
