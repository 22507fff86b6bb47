"""Real environments of gem."""

import itertools
from typing import Any

import pytest

from agentrl.core.errors import EnvLoadError
from agentrl.core.types import Status
from agentrl.suites.load import load_agent
from tests.unit.suites.suites import begin, episode, say, script, session

pytest.importorskip("gem")
pytest.importorskip("reasoning_gym", exc_type=ImportError)

pytestmark = pytest.mark.anyio

GUESS = "gem:game:GuessTheNumber-v0-easy"
PLAYS: dict[str, tuple[str, ...]] = {
    GUESS: (r"\boxed{5}", r"\boxed{2}", r"\boxed{8}", r"\boxed{9}"),
    "gem:game:Mastermind-v0-easy": (r"\boxed{1 2}", r"\boxed{3 4}", r"\boxed{5 6}"),
    "gem:game:Minesweeper-v0-easy": (r"\boxed{reveal 0 0}", r"\boxed{flag 1 1}", r"\boxed{reveal 4 4}"),
    "gem:game:Game2048-v0-easy": (r"\boxed{up}", r"\boxed{left}", r"\boxed{down}", r"\boxed{right}"),
    "gem:game:FifteenPuzzle-v0-easy": (r"\boxed{up}", r"\boxed{left}", r"\boxed{down}"),
    "gem:game:TowerofHanoi-v0-easy": (r"\boxed{A C}", r"\boxed{A B}", r"\boxed{C B}"),
    "gem:rg:chain_sum": (r"\boxed{7}",),
}


@pytest.mark.parametrize("spec", PLAYS)
async def test_a_game_is_the_same_by_method_and_through_the_boundary(spec: str) -> None:
    said = script(spec, 3, PLAYS[spec])
    assert said == await session(spec, 3, PLAYS[spec])
    assert len(said) > 1
    assert all(isinstance(turn[0], str) or turn[2] or turn[3] for turn in said[1:])


@pytest.mark.parametrize("spec", PLAYS)
async def test_an_episode(spec: str) -> None:
    said = script(spec, 3, PLAYS[spec])
    trajectory = await episode(spec, 3, PLAYS[spec])
    assert trajectory.error is None
    assert trajectory.status == (Status.FINISHED if said[-1][2] else Status.TRUNCATED)
    assert [turn.reward for turn in trajectory.turns] == pytest.approx([turn[1] for turn in said[1:]])
    assert len(trajectory.turns) == len(said) - 1


@pytest.mark.parametrize("spec", ["gem:game:Game2048-v0-easy", "gem:game:GuessTheNumber-v0-random", GUESS])
def test_interleaved_episodes_are_what_they_are_alone(spec: str) -> None:
    answers = PLAYS.get(spec, PLAYS[GUESS])
    alone = {seed: script(spec, seed, answers) for seed in (3, 4)}
    (a, first_a), (b, first_b) = begin(spec, 3), begin(spec, 4)
    said: dict[int, list[Any]] = {3: [first_a], 4: [first_b]}
    open_games = {3: a, 4: b}
    for answer in answers:
        for seed, env in list(open_games.items()):
            result = say(env, answer)
            said[seed].append((result.observation, result.reward, result.terminated, result.truncated))
            if result.terminated or result.truncated:
                del open_games[seed]
    assert said == alone
    assert alone[3] != alone[4]


def test_a_win_is_paid_and_halving_always_wins() -> None:
    for seed in range(10):
        env, low, high = begin(GUESS, seed)[0], 1, 10
        while True:
            guess = (low + high) // 2
            result = say(env, rf"I think it is \boxed{{{guess}}}.")
            if result.terminated:
                break
            low, high = (guess + 1, high) if "higher" in result.observation else (low, guess - 1)
        assert result.reward == 1.0


def test_an_answer_without_a_move_costs_what_gem_says() -> None:
    result = say(begin(GUESS)[0], "five")
    assert (result.reward, result.terminated) == (-0.1, True)


def test_observations_do_not_repeat_the_history_and_hold_the_suffix() -> None:
    env, first = begin(GUESS, 1)
    assert first.startswith("You are playing Guess The Number.")
    assert first.endswith("Enter your next guess.")
    observation = say(env, r"\boxed{1}").observation
    assert "You are playing" not in observation
    assert observation.endswith("Enter your next guess.")


def test_tasks_are_seeds() -> None:
    assert [task.seed for task in load_agent(f"{GUESS}?num_tasks=3").load().tasks()] == [0, 1, 2]
    assert [task.seed for task in itertools.islice(load_agent(GUESS).load().tasks(), 2)] == [None, None]
    assert begin(GUESS, 8)[1] == begin(GUESS, 8)[1]


def test_options_reach_the_environment() -> None:
    assert "between 1 and 3 (inclusive) within 2 turns" in begin(f"{GUESS}?max_number=3&max_turns=2")[1]


@pytest.mark.parametrize(
    ("spec", "problem", "remedy"),
    [
        ("gem:GuessTheNumber-v0", "gem has no 'GuessTheNumber-v0'", "game:GuessTheNumber-v0-easy"),
        ("gem:rg:composite", "Must specify at least one dataset", "Options"),
        (f"{GUESS}?num_tasks=0", "num_tasks = 0", "from 1"),
    ],
)
def test_a_wrong_specification_is_refused_at_once(spec: str, problem: str, remedy: str) -> None:
    with pytest.raises(EnvLoadError) as caught:
        load_agent(spec)
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy
