import pytest

from tests.unit.envs.play import load, play, total

GuessNumber = load("guess_number")
TASKS = {task.label: task for task in GuessNumber.tasks()}


def test_every_guess_gets_a_hint_until_the_number_is_hit():
    results = play(GuessNumber, TASKS[6], "8", "Is it 4?", "6")
    assert [result.observation for result in results] == ["lower", "higher", None]
    assert [result.terminated for result in results] == [False, False, True]
    assert total(results) == 1.0
    assert (results[-1].score, results[-1].info) == (1.0, {"guesses": 3.0})


def test_a_late_win_pays_as_much_as_an_early_one():
    assert total(play(GuessNumber, TASKS[8], "8")) == total(play(GuessNumber, TASKS[8], "1", "2", "3", "8")) == 1.0


def test_the_fourth_miss_ends_the_game():
    results = play(GuessNumber, TASKS[8], "1", "2", "3", "4")
    assert results[-1].terminated
    assert (total(results), results[-1].score) == (0.0, 0.0)


@pytest.mark.parametrize("text", ["", "eight", "?"])
def test_no_number_ends_the_game(text):
    (result,) = play(GuessNumber, TASKS[8], text)
    assert (result.reward, result.score, result.terminated) == (0.0, 0.0, True)


def test_a_number_of_any_length_gets_a_hint():
    (result,) = play(GuessNumber, TASKS[8], "9" * 5000)
    assert (result.observation, result.terminated) == ("lower", False)


def test_halving_always_wins():
    for number, task in TASKS.items():
        low, high, guesses = 1, 15, []
        while not guesses or guesses[-1] != number:
            guesses.append((low + high) // 2)
            low, high = (guesses[-1] + 1, high) if guesses[-1] < number else (low, guesses[-1] - 1)
        assert play(GuessNumber, task, *map(str, guesses))[-1].score == 1.0


def test_the_prompt_does_not_give_the_number_away():
    assert sorted(TASKS) == list(range(1, 16))
    assert len({task.prompt for task in TASKS.values()}) == 1
