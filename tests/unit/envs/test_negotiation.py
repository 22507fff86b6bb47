from collections.abc import Sequence

import pytest

from agentrl import ResetState, StepResult, StepState
from tests.unit.envs.play import load

Negotiation = load("negotiation")
(TASK,) = [task for task in Negotiation.tasks() if task.label == 9]


def haggle(*texts: str, agents: Sequence[str] = ("ann", "bob")) -> list[StepResult]:
    env, results = Negotiation(), []
    opening = env.reset(ResetState(task=TASK, observation=TASK.prompt, label=9, seed=0))
    assert opening.observations == {"ann": "You are Ann. Split 9 coins.", "bob": "You are Bob. Split 9 coins."}
    for turn, text in enumerate(texts):
        assert not results or not results[-1].terminated
        results.append(env.step(StepState(task=TASK, label=9, action_text=text, turn=turn, agent=agents[turn % 2])))
    return results


def test_each_is_told_what_the_other_takes():
    first, second = haggle("I take 6", "5")
    assert (first.observation, second.observation) == ("They take 6. What is 9-6?", "They take 5. What is 9-5?")
    assert (first.reward, second.reward, second.rewards) == (0.0, 0.0, {})


def test_demands_that_fit_pay_both():
    result = haggle("6", "5", "4")[-1]
    assert (result.terminated, result.reward, result.rewards) == (True, pytest.approx(4 / 9), {"bob": pytest.approx(5 / 9)})
    assert result.info == {"gain": pytest.approx(1.0)}
    result = haggle("6", "2")[-1]
    assert (result.reward, result.rewards, result.info["gain"]) == (
        pytest.approx(2 / 9),
        {"ann": pytest.approx(6 / 9)},
        pytest.approx(8 / 9),
    )


def test_only_the_last_two_demands_count():
    assert not haggle("1", "9", "8")[-1].terminated


def test_four_demands_that_do_not_fit_pay_nobody():
    result = haggle("9", "9", "9", "9")[-1]
    assert (result.terminated, result.reward, result.rewards, result.info) == (True, 0.0, {}, {"gain": 0.0})


@pytest.mark.parametrize("text", ["", "half", "10", "9" * 5000])
def test_no_demand_or_too_large_a_one_ends_the_game_at_a_price(text):
    result = haggle("3", text)[-1]
    assert (result.terminated, result.reward, result.rewards) == (True, -0.2, {})
