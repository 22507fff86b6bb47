from typing import Any

import pytest

from agentrl import ResetState, StepState
from agentrl.suites.load import load_agent
from tests.unit.envs.play import load

SPECS = {"frozen_lake": "gym:FrozenLake-v1?is_slippery=False", "blackjack": "gym:Blackjack-v1?max_invalid=1&invalid_reward=-0.1"}


def script(cls: type[Any], seed: int, *answers: str) -> list[Any]:
    env = cls()
    said = [env.reset(ResetState(seed=seed)).observation]
    for answer in answers:
        result = env.step(StepState(action_text=answer))
        said.append((result.observation, result.reward, result.terminated, result.truncated))
        if result.terminated:
            break
    env.close()
    return said


@pytest.mark.parametrize(
    ("name", "answers"),
    [("frozen_lake", ["down", "hm", "down", "right", "Right!", "down", "right"]), ("frozen_lake", ["right", "down"])]
    + [("blackjack", [*answers, "stick"]) for answers in ([], ["hit"], ["hit", "hm", "hit"], ["hm", "hm"])],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_file_plays_as_the_specification_in_its_docstring(name: str, answers: list[str], seed: int) -> None:
    assert script(load(name), seed, *answers) == script(load_agent(SPECS[name]).load(), seed, *answers)


def test_the_goal_is_paid() -> None:
    last = script(load("frozen_lake"), 0, "down", "down", "right", "right", "down", "right")[-1]
    assert last[1:] == (1.0, True, False)


def test_a_second_invalid_answer_forfeits_the_game() -> None:
    assert [turn[1:] for turn in script(load("blackjack"), 0, "fold", "fold")[1:]] == [(-0.1, False, False), (-0.1, True, False)]


def test_a_group_is_dealt_the_same_cards() -> None:
    firsts = [script(load("blackjack"), seed)[0] for seed in (3, 3, 4, 5, 6, 7)]
    assert firsts[0] == firsts[1]
    assert len(set(firsts)) > 2


def test_a_win_is_a_success_and_nothing_else() -> None:
    Blackjack = load("blackjack")
    for seed in range(20):
        env = Blackjack()
        env.reset(ResetState(seed=seed))
        result = env.step(StepState(action_text="stick"))
        assert result.score == (result.reward > 0)
