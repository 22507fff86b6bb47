"""Real games of TextArena."""

import itertools
import random
from typing import Any

import pytest

from agentrl import Task
from agentrl.config.sections import changed
from agentrl.core.errors import EnvLoadError
from agentrl.core.types import GroupRequest, Status, Trajectory
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import CODEC, PATIENT, Scene
from tests.unit.suites.suites import begin, episode, say, script, session

pytest.importorskip("textarena")

pytestmark = pytest.mark.anyio

GUESS = "textarena:GuessTheNumber-v0"
HANOI = "textarena:TowerOfHanoi-v0"
SOLUTION = ("[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]")
PLAYS: dict[str, tuple[str, ...]] = {
    GUESS: ("[5]", "[2]", "[8]", "[9]"),
    HANOI: SOLUTION,
    "textarena:FrozenLake-v0-random": ("[down]", "[right]", "[up]"),
    "textarena:Blackjack-v0": ("[hit]", "[stand]", "[hit]", "[stand]"),
    "textarena:2048-v0-easy": ("[up]", "[left]", "[down]", "[right]"),
    "textarena:Mastermind-v0": ("[1 2 3 4]", "[5 6 1 2]"),
    "textarena:Countdown-v0": ("[1 2 +]", "[1 2 -]"),
    "textarena:Bandit-v0": ("[red]", "[blue]"),
}


@pytest.mark.parametrize("spec", PLAYS)
async def test_a_game_is_the_same_by_method_and_through_the_boundary(spec: str) -> None:
    said = script(spec, 3, PLAYS[spec])
    assert said == await session(spec, 3, PLAYS[spec])
    assert len(said) > 1


@pytest.mark.parametrize("spec", PLAYS)
async def test_an_episode(spec: str) -> None:
    said = script(spec, 3, PLAYS[spec])
    trajectory = await episode(spec, 3, PLAYS[spec])
    assert trajectory.error is None
    assert trajectory.status == (Status.FINISHED if said[-1][2] else Status.TRUNCATED)
    assert [turn.reward for turn in trajectory.turns] == pytest.approx([turn[1] for turn in said[1:]])
    assert len(trajectory.turns) == len(said) - 1


@pytest.mark.parametrize("spec", ["textarena:Blackjack-v0", "textarena:2048-v0-easy", GUESS])
def test_interleaved_episodes_are_what_they_are_alone(spec: str) -> None:
    answers = PLAYS[spec]
    alone = {seed: script(spec, seed, answers) for seed in (3, 5)}
    (a, first_a), (b, first_b) = begin(spec, 3), begin(spec, 5)
    said: dict[int, list[Any]] = {3: [first_a], 5: [first_b]}
    open_games = {3: a, 5: b}
    for answer in answers:
        random.seed(1)  # whatever else the process does
        for seed, env in list(open_games.items()):
            result = say(env, answer)
            said[seed].append((result.observation, result.reward, result.terminated, result.truncated))
            if result.terminated:
                del open_games[seed]
    assert said == alone
    assert alone[3] != alone[5]


def test_the_reward_comes_with_the_last_turn() -> None:
    said = script(HANOI, 0, SOLUTION)
    assert [turn[1] for turn in said[1:]] == [0.0] * 6 + [1.0]
    assert [turn[2] for turn in said[1:]] == [False] * 6 + [True]


def test_the_model_is_told_only_what_is_new() -> None:
    env, first = begin(HANOI)
    assert first.startswith("You are playing Tower of Hanoi")
    told = say(env, "[A C]").observation
    assert "You are playing" not in told
    assert "[A C]" not in told
    assert "C: [1]" in told


def test_a_move_may_come_without_brackets_where_the_suite_adds_them() -> None:
    assert say(begin(HANOI)[0], "A C") == say(begin(HANOI)[0], "[A C]")
    assert "invalid move" in say(begin(f"{HANOI}-raw")[0], "A C").observation


def test_a_second_invalid_move_in_a_row_ends_the_game() -> None:
    env, _ = begin(HANOI)
    first, second = say(env, "[B A]"), say(env, "[B A]")
    assert "invalid move" in first.observation
    assert (first.terminated, second.terminated) == (False, True)
    assert second.info == {"invalid_move": 1.0}


def test_tasks_are_seeds() -> None:
    assert [task.seed for task in load_agent(f"{GUESS}?num_tasks=3").load().tasks()] == [0, 1, 2]
    assert [task.seed for task in itertools.islice(load_agent(GUESS).load().tasks(), 2)] == [None, None]
    lakes = [begin("textarena:FrozenLake-v0-random", seed)[1] for seed in (1, 1, 2, 3)]
    assert lakes[0] == lakes[1]
    assert len(set(lakes)) > 1


def test_options_reach_the_game() -> None:
    assert "between 1 and 3 within 2 turns" in begin(f"{GUESS}?max_number=3&max_turns=2")[1]


@pytest.mark.parametrize(
    ("spec", "problem", "remedy"),
    [
        ("textarena:GuessNumber-v0", "TextArena has no 'GuessNumber-v0'", "GuessTheNumber-v0"),
        ("textarena:ThreePlayerTicTacToe-v0", "cannot be played by 1 or 2", "players=3"),
        ("textarena:TicTacToe-v0?players=1", "cannot be played by 1", "players=3"),
        ("textarena:QuantumTicTacToe-v0?players=1", "cannot be played by 1: it is no game for one", "players=3"),
        (f"{GUESS}?players=2", "cannot be played by 2", "players=3"),
        (f"{GUESS}?players=all", "players = 'all'", "from 1"),
        (f"{GUESS}?minimum=3", "unexpected keyword argument 'minimum'", "Options"),
        (f"{GUESS}?num_tasks=0", "num_tasks = 0", "from 1"),
    ],
)
def test_a_wrong_specification_is_refused_at_once(spec: str, problem: str, remedy: str) -> None:
    with pytest.raises(EnvLoadError) as caught:
        load_agent(spec)
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


async def rounds(spec: str, *answers: str) -> dict[str, Trajectory]:
    """A game of several players, by agent."""
    engine = ScriptedEngine(answer=lambda request: CODEC.encode_text(f"{answers[len(engine.requests) - 1]}<|im_end|>"), max_model_len=8192)
    cls = load_agent(spec).load()
    settings = changed(PATIENT, max_new_tokens=64, max_turns=len(answers))
    scene = Scene(cls, engine, settings, GroupRequest(group_id=1, task=Task("x", seed=1), n_samples_per_prompt=2, version=0))
    return {trajectory.agent: trajectory for trajectory in await scene.play_all()}


def read(trajectory: Trajectory, turn: int) -> str:
    return trajectory.turns[turn].prompt_text


async def test_a_game_of_two_is_an_episode_of_two_agents() -> None:
    played = await rounds("textarena:TicTacToe-v0", "[0]", "[4]", "[1]", "[3]", "[2]")
    first, second = played["player0"], played["player1"]
    assert (first.status, second.status) == (Status.FINISHED, Status.FINISHED)
    assert (first.reward, second.reward) == (1.0, -1.0)
    assert (len(first.turns), len(second.turns)) == (3, 2)
    assert "You are Player 0" in read(first, 0)
    assert "You are Player 1" in read(second, 0)
    assert "You are Player" not in read(first, 1)
    assert "[Player 1] [4]" in read(first, 1)
    assert "[Player 0] [0]" in read(second, 0)


async def test_who_made_an_invalid_move_moves_again_and_may_lose() -> None:
    played = await rounds("textarena:TicTacToe-v0", "[0]", "[0]", "[0]")
    assert [len(played[name].turns) for name in ("player0", "player1")] == [1, 2]
    assert "invalid move" in read(played["player1"], 1)
    assert [played[name].reward for name in ("player0", "player1")] == [1.0, -1.0]
    charged = {"invalid_move": 1.0, "invalid_move_player0": 0.0, "invalid_move_player1": 1.0}
    assert played["player1"].turns[-1].info == charged


async def test_the_game_says_who_begins() -> None:
    played = await rounds("textarena:KuhnPoker-v0-short", "[check]", "[check]")
    assert {name: [turn.number for turn in trajectory.turns] for name, trajectory in played.items()} == {"player0": [1], "player1": [0]}


def test_games_of_more_players_are_asked_for() -> None:
    assert load_agent("textarena:ThreePlayerTicTacToe-v0?players=3").load().agents == ("player0", "player1", "player2")
    assert load_agent("textarena:TicTacToe-v0").load().agents == ("player0", "player1")
    assert load_agent(GUESS).load().agents == ()
