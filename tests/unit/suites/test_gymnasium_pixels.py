"""Environments of gymnasium that show themselves as pictures."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image

from agentrl import GymEnv, ResetState, StepState, Task
from agentrl.cluster.plan import observing
from agentrl.config.load import load_given
from agentrl.core.errors import ConfigError, EnvLoadError
from agentrl.core.types import Message
from agentrl.env.results import check_reset, check_step
from agentrl.resolve.commands import TRAIN
from agentrl.suites.gymnasium_vector import load_gym


class Dot(gymnasium.Env[int, int]):
    """A bright dot walks along a line; its place is to be seen in the picture alone."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space, action_space = spaces.Discrete(4), spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None, start: int = 0, drawn: bool = True) -> None:
        self.render_mode, self.start, self.drawn = render_mode, start, drawn

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = self.start
        return self.at, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.at += 1 if action else -1
        return self.at, float(self.at == 2), self.at == 2, False, {}

    def render(self) -> Any:
        if self.render_mode != "rgb_array" or not self.drawn:
            return None
        picture = np.zeros((8, 32, 3), dtype=np.uint8)
        picture[:, 8 * self.at : 8 * self.at + 8] = 255
        return picture


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    gymnasium.register("agentrl-tests/Dot-v0", entry_point=Dot)
    yield
    del gymnasium.registry["agentrl-tests/Dot-v0"]


CHOOSE = "Choose a number from 0 to 1."
DOT = "gym:agentrl-tests/Dot-v0?observe=pixels"


def place(image: str) -> int:
    """The place of the dot in a picture."""
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(image.partition(",")[2]))))
    assert pixels.shape == (8, 32, 3)
    return int(pixels[0, ::8, 0].argmax())


def say(text: str, turn: int) -> StepState:
    return StepState(task=Task("x"), label=None, action_text=text, turn=turn, finish_reason="stop")


def test_each_observation_is_the_picture_of_the_environment() -> None:
    env = load_gym(f"{DOT}&start=1")()
    first = check_reset(env.reset(ResetState(task=Task("x"), observation="x", label=None, seed=0)), "r", "x")
    assert first.observation == (Message(role="user", content=CHOOSE),)
    assert [place(image) for image in first.images] == [1]
    second = check_step(env.step(say("0", 0)), "s")
    assert (second.observation, [place(image) for image in second.images]) == ((Message(role="user", content=CHOOSE),), [0])
    wrong = check_step(env.step(say("nowhere", 1)), "s")
    assert (wrong.images, wrong.info) == ((), {"invalid_action": 1.0})
    env.step(say("1", 2))
    last = check_step(env.step(say("1", 3)), "s")
    assert (last.reward, last.terminated, last.images) == (1.0, True, ())
    env.close()


def test_lanes_of_a_vector_environment_show_their_own_pictures() -> None:
    cls = load_gym(f"{DOT}&num_envs=2")

    async def play() -> list[list[int]]:
        envs = [cls(), cls()]
        shown = []
        for env in envs:
            result = await env.reset(ResetState(task=Task("x"), observation="x", label=None, seed=0))  # type: ignore[misc]
            shown.append([place(image) for image in check_reset(result, "r", "x").images])
        steps = await asyncio.gather(*(env.step(say(text, 0)) for env, text in zip(envs, "10", strict=True)))  # type: ignore[call-overload]
        for seen, step in zip(shown, steps, strict=True):
            seen += [place(image) for image in check_step(step, "s").images]
        await asyncio.gather(*(env.close() for env in envs))  # type: ignore[call-overload]
        return shown

    assert asyncio.run(play())[0] == [0, 1]


def test_a_class_of_its_own_says_what_stands_beside_its_pictures() -> None:
    class Walk(GymEnv):
        env_id, observe, actions = "agentrl-tests/Dot-v0", "pixels", {"left": 0, "right": 1}

        def instructions(self) -> str:
            return "Go right."

        def caption(self) -> str:
            return "And now?"

    env = Walk()
    first = env.reset(ResetState(task=Task("x"), observation="x", label=None, seed=0))
    assert (first.observation, len(first.images)) == ("Go right.", 1)
    second = env.step(say("right", 0))
    assert (second.observation, len(second.images)) == ("And now?", 1)


def test_text_is_shown_unless_pictures_are_asked_for() -> None:
    env = load_gym("gym:agentrl-tests/Dot-v0")()
    first = env.reset(ResetState(task=Task("x"), observation="x", label=None, seed=0))
    assert (first.observation, list(first.images)) == (f"{CHOOSE}\n0", [])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("observe=picture", "observe = 'picture' is unknown. Give text or pixels."),
        ("observe=pixels&drawn=False", "render returned NoneType, no picture"),
        ("observe=pixels&render_mode=None", "render returned NoneType, no picture"),
        ("observe=pixels&num_envs=2&vectorization_mode=async", "which give no pictures. Give sync"),
    ],
)
def test_what_gives_no_pictures_is_refused_before_a_run(options: str, words: str) -> None:
    with pytest.raises(EnvLoadError) as raised:
        load_gym(f"gym:agentrl-tests/Dot-v0?{options}")
    assert words in str(raised.value)


def test_an_environment_that_knows_no_such_mode_is_refused() -> None:
    gymnasium.register("agentrl-tests/Blind-v0", entry_point=lambda **options: Dot(**{**options, "drawn": False}))
    with pytest.raises(EnvLoadError, match="no picture"):
        load_gym("gym:agentrl-tests/Blind-v0?observe=pixels")
    del gymnasium.registry["agentrl-tests/Blind-v0"]


def test_the_flag_asks_an_environment_of_gymnasium_for_pictures() -> None:
    assert observing("gym:A-v0", "pixels") == "gym:A-v0?observe=pixels"
    assert observing("gym:A-v0?a=1", "pixels") == "gym:A-v0?a=1&observe=pixels"
    assert observing("gym:A-v0?observe=text", "pixels") == "gym:A-v0?observe=text"
    assert observing("env.py", "text") == "env.py"
    config = load_given(TRAIN, {"agent": "gym:A-v0", "observe": "pixels", "model": "tiny-vision"})
    assert config.run.agent == "gym:A-v0?observe=pixels"
    with pytest.raises(ConfigError, match=r"--observe = 'pixels': is for gym:ID, and --agent is 'env.py'"):
        load_given(TRAIN, {"agent": "env.py", "observe": "pixels"})
