import pytest

from tests.unit.envs.play import load, play

Arithmetic = load("arithmetic")


@pytest.mark.parametrize(
    ("question", "answer", "reward"),
    [
        ("3+4", "7", 1.0),
        ("3+4", "The answer is 7.", 1.0),
        ("3+4", "17", 0.0),
        ("3+4", "7 or 8", 0.0),
        ("3+4", "seven", 0.0),
        ("3+4", "", 0.0),
        ("9+8", "17", 1.0),
        ("5-5", "0", 1.0),
        ("5-4", "-1", 0.0),
    ],
)
def test_the_last_number_is_the_answer(question, answer, reward):
    (task,) = [task for task in Arithmetic.tasks() if task.id == question]
    (result,) = play(Arithmetic, task, answer)
    assert (result.reward, result.terminated) == (reward, True)


def test_every_task_has_the_label_that_its_question_asks_for():
    tasks = list(Arithmetic.tasks())
    assert len({task.id for task in tasks}) == len(tasks) == 155
    for task in tasks:
        assert task.prompt == f"What is {task.id}?"
        assert task.label == (int(task.id[0]) + int(task.id[2]) if task.id[1] == "+" else int(task.id[0]) - int(task.id[2]))
        assert task.label >= 0
