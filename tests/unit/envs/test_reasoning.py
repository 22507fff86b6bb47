import pytest

from agentrl.suites.load import load_agent
from tests.unit.envs.play import load, play

pytest.importorskip("reasoning_gym", exc_type=ImportError)

Reasoning = load("reasoning")


def test_the_answer_counts_to_the_letter():
    for task in Reasoning.tasks():
        number = int(task.prompt.rstrip("?").rpartition(" ")[2])
        assert task.label == str(number.bit_count())
        (result,) = play(Reasoning, task, f" {task.label}\n")
        assert (result.reward, result.terminated) == (1.0, True)
        for answer in ("", f"1{task.label}", f"{task.label} or 9", f"It is {task.label}."):
            assert play(Reasoning, task, answer)[0].reward == 0.0


def test_every_question_is_there_once_and_the_same_in_every_run():
    first, again = Reasoning.tasks(), Reasoning.tasks()
    assert [(task.id, task.prompt, task.label) for task in first] == [(task.id, task.prompt, task.label) for task in again]
    assert len({task.prompt for task in first}) == len({task.id for task in first}) == len(first) == 63


def test_the_file_asks_what_the_specification_in_its_docstring_asks():
    cls = load_agent("reasoning-gym:count_bits?max_n=63&ask=").load()
    asked = {(item["question"], item["answer"]) for item in map(cls.make_item, range(1000))}
    assert asked == {(task.prompt, task.label) for task in Reasoning.tasks()}
