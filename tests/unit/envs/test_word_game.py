import sys

import pytest

from tests.unit.envs.play import load, play, total

WordGame = load("word_game")
TASKS = {task.id: task for task in WordGame.tasks()}
game = sys.modules[WordGame.__module__]


@pytest.mark.parametrize(
    ("guess", "secret", "hint"),
    [
        ("eagle", "beach", "e a - - -"),  # the second e has no partner left
        ("sheep", "eagle", "- - e e -"),  # two of two
        ("melon", "lemon", "m E l O N"),
        ("level", "lemon", "L E - - -"),  # the l and the e in their places use them up
        ("green", "eagle", "g - e e -"),
        ("mimic", "mimic", "M I M I C"),
        ("kayak", "radio", "- A - - -"),  # the later a counts as placed, the other has none left
        ("llama", "label", "L l a - -"),  # the second a has no partner
        ("sleep", "level", "- l e E -"),
        ("glass", "zebra", "- - a - -"),
    ],
)
def test_hints(guess, secret, hint):
    assert game.hint(guess, secret) == hint


def test_a_hint_never_promises_more_letters_than_there_are():
    for secret in game.WORDS:
        for guess in game.WORDS:
            marks = game.hint(guess, secret).split()
            for letter in set(guess):
                assert sum(mark.lower() == letter for mark in marks) == min(guess.count(letter), secret.count(letter))
            assert all((mark == own.upper()) == (own == right) for mark, own, right in zip(marks, guess, secret, strict=True))


def others(task):
    return [word for word in task.metadata["words"] if word != task.label]


def test_a_win_is_paid_whenever_it_comes():
    task = TASKS["eagle-0"]
    for count in range(4):
        results = play(WordGame, task, *others(task)[:count], f"It must be {task.label.upper()}!")
        assert [result.terminated for result in results] == [False] * count + [True]
        assert (total(results), results[-1].score, results[-1].info["guesses"]) == (1.0, 1.0, count + 1)


def test_the_fourth_wrong_guess_ends_the_game_and_placed_letters_are_paid_once():
    task = TASKS["eagle-0"]
    wrong = others(task)[0]
    results = play(WordGame, task, wrong, wrong, wrong, wrong)
    placed = sum(own == right for own, right in zip(wrong, task.label, strict=True))
    assert (results[-1].terminated, results[-1].score) == (True, 0.0)
    assert total(results) == pytest.approx(0.1 * placed)
    assert all(total(play(WordGame, task, *others(task)[first : first + 4])) <= 0.5 for first in range(7))


def test_what_is_not_in_the_list_costs_no_guess_and_ends_the_game_the_second_time():
    task = TASKS["eagle-0"]
    first, *rest = play(WordGame, task, "hm, zzzzz?", *others(task)[:3], task.label)
    assert (first.reward, first.observation, first.terminated, first.info) == (-0.1, "Name a word of the list.", False, {"invalid": 1.0})
    assert rest[-1].score == 1.0
    results = play(WordGame, task, "", others(task)[0], "none")
    assert [result.terminated for result in results] == [False, False, True]
    assert total(results) == pytest.approx(-0.2)


def test_the_last_word_of_the_list_is_the_guess():
    task = TASKS["eagle-0"]
    (result,) = play(WordGame, task, f"{others(task)[0]} or about? No: {task.label}, I would say")
    assert result.score == 1.0


def test_tasks():
    assert len(TASKS) == 5 * len(game.WORDS)
    assert len(set(game.WORDS)) == len(game.WORDS) > 100
    assert all(len(word) == 5 and word.islower() for word in game.WORDS)
    for task in TASKS.values():
        assert len(set(task.metadata["words"])) == 12
        assert task.label in task.metadata["words"]
        assert all(word in task.prompt for word in task.metadata["words"])
    assert next(iter(WordGame.tasks())).prompt == next(iter(TASKS.values())).prompt
    assert len({task.prompt for task in TASKS.values() if task.label == "eagle"}) == 5


def test_following_the_hints_always_narrows_the_list_down_and_mostly_wins():
    wins = 0
    for task in TASKS.values():
        left, answers = list(task.metadata["words"]), []
        while len(answers) < 4 and task.label not in answers:
            answers.append(left[0])
            left = [word for word in left[1:] if game.hint(answers[-1], word) == game.hint(answers[-1], task.label)]
            assert task.label in [*left, *answers]
        wins += play(WordGame, task, *answers)[-1].score
    assert wins / len(TASKS) > 0.97
