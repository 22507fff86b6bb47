"""Arrays as text for the model: nothing is left out, or they are refused."""

from __future__ import annotations

import json
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from agentrl import ResetState, StepState, Task
from agentrl.core.errors import EnvLoadError, EnvResultError
from agentrl.env.tools.environment import _as_text
from agentrl.env.whole_text import whole_text
from agentrl.suites.gymnasium import GymEnv
from agentrl.suites.gymnasium_vector import load_gym
from agentrl.suites.load import load_agent

LONG = np.arange(1500)


@pytest.mark.parametrize(
    "value",
    [LONG, {"board": LONG}, (1, [LONG]), torch.arange(1500), {"board": torch.arange(1500)}, LONG.reshape(30, 50)],
    ids=["array", "dictionary", "nested", "tensor", "dictionary of a tensor", "matrix"],
)
def test_every_number_of_an_array_is_shown(value: Any) -> None:
    text = whole_text(value)
    assert "..." not in text
    assert all(str(number) in text for number in LONG)
    assert "..." not in _as_text(value)


def test_other_values_read_as_before() -> None:
    values: list[Any] = ["a", 1, 2.5, None, np.int64(3), np.zeros(3), (np.zeros(2), 1), {"a": [1]}, np.float32(0.5), {1}]
    assert [whole_text(value) for value in values] == [str(value) for value in values]
    assert _as_text({"a": np.zeros(3), "b": [1]}) == json.dumps({"a": "[0. 0. 0.]", "b": [1]})


def test_a_table_of_pandas_is_shown_whole() -> None:
    table = pytest.importorskip("pandas").DataFrame({"number": LONG})
    assert len(whole_text(table).splitlines()) == 1501


class Board(gymnasium.Env[Any, int]):
    """Shows numbers; its reward may have parts."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, shape: Any = (40, 40), reward: Any = 1.0, render_mode: str | None = None) -> None:
        self.observation_space, self.action_space = spaces.Box(0, 2000, shape, np.int64), spaces.Discrete(2)
        self.render_mode, self.reward = render_mode, reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.arange(int(np.prod(self.observation_space.shape or ()))).reshape(self.observation_space.shape or ()), {}

    def step(self, action: int) -> Any:
        return self.reset()[0], self.reward, False, False, {}

    def render(self) -> Any:
        return np.zeros((4, 4, 3), np.uint8)


gymnasium.register("Board-v0", Board)


def first(cls: Any) -> Any:
    task = Task("x", seed=0)
    env = cls()
    return env, env.reset(ResetState(task=task, observation=task.prompt, label=None, seed=0))


def answer(text: str) -> StepState:
    return StepState(
        task=Task("x"), action_text=text, label=None, observation_text="", turn=0, turns_left=3, finish_reason="stop", agent=""
    )


def test_an_observation_above_numpys_threshold_is_shown_whole() -> None:
    _, shown = first(load_gym("gym:Board-v0?num_tasks=1"))
    assert "..." not in shown.observation
    assert all(str(number) in shown.observation for number in range(1600))


def test_an_observation_of_a_picture_is_refused_with_the_remedy_before_anything_starts() -> None:
    with pytest.raises(EnvLoadError, match=r"an observation has 100,800 numbers, and 10,000 are shown.*\?observe=pixels"):
        load_agent("gym:Board-v0?shape=(210,160,3)")
    assert load_agent("gym:Board-v0?shape=(210,160,3)&observe=pixels").name == "Board"
    mine = type("Mine", (GymEnv,), {"make": lambda self: Board((210, 160, 3))})
    with pytest.raises(RuntimeError, match=r"Mine: an observation has 100,800 numbers.*write a format_observation"):
        first(mine)
    nested = spaces.Dict({"a": spaces.Tuple([spaces.Box(0, 1, (100, 101)), spaces.Discrete(3)])})
    mine = type("Mine", (GymEnv,), {"make": lambda self: type("Nested", (Board,), {"observation_space": nested})()})
    env = mine()
    env.env = env.make()
    env.env.observation_space = nested
    with pytest.raises(RuntimeError, match="an observation has 10,101 numbers"):
        env.format_observation({})


@pytest.mark.parametrize("reward", [np.array([1.0, 2.0]), np.zeros((2, 2))])
def test_a_reward_with_parts_is_refused_by_name(reward: Any) -> None:
    env, _ = first(type("Several", (GymEnv,), {"make": lambda self: Board((3,), reward)}))
    with pytest.raises(EnvResultError, match=r"Several returned reward = .*: is a vector, .*LinearReward"):
        env.step(answer("1"))


@pytest.mark.parametrize("reward", [np.float32(0.5), np.array([0.5]), np.array(0.5), 0.5])
def test_a_reward_of_one_number_is_taken_in_any_form(reward: Any) -> None:
    env, _ = first(type("One", (GymEnv,), {"make": lambda self: Board((3,), reward)}))
    assert env.step(answer("1")).reward == 0.5
