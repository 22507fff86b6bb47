"""Trajectories as JSON and back."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentrl import StepResult, Task
from agentrl.core.types import Status, Trajectory
from agentrl.rollout.records import EngineLimits, recorded_generations, recorded_limits, recorded_ticket, trajectory_record
from agentrl.track.jsonl import encode
from tests.unit.rollout.scenes import CODEC, TASK, Scene, env_class, says

pytestmark = pytest.mark.anyio


def again(scene: Scene, trajectory: Trajectory, limits: EngineLimits | None = None) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(encode(trajectory_record(scene.ticket, trajectory, limits)))
    return record


async def test_the_turn_that_broke_the_environment_is_recorded() -> None:
    def step(state: Any) -> StepResult:
        if state.turn == 1:
            raise ValueError("cannot")
        return StepResult(0.5, "go on")

    scene = Scene(env_class(step))
    scene.engine.answer = says("fine", "fatal")
    trajectory = await scene.play()
    record = again(scene, trajectory)
    assert record["status"] == Status.ENV_ERROR
    assert [turn["text"] for turn in record["turns"]] == ["fine<|im_end|>"]
    assert record["unanswered"]["text"] == "fatal<|im_end|>"
    texts = [CODEC.decode(generation.token_ids.tolist()) for generation in recorded_generations(record)]
    assert texts == ["fine<|im_end|>", "fatal<|im_end|>"]
    assert trajectory.num_tokens == len(trajectory.turns[0].token_ids)


async def test_an_answered_episode_has_no_unanswered_turn() -> None:
    scene = Scene(env_class(lambda state: StepResult(1.0, terminated=True)))
    scene.engine.answer = says("done")
    record = again(scene, await scene.play(), EngineLimits(max_model_len=64, end_token_ids=(3, 4)))
    assert "unanswered" not in record
    assert recorded_limits(record) == EngineLimits(max_model_len=64, end_token_ids=(3, 4))


@pytest.mark.parametrize(
    ("label", "inexact"),
    [
        ("three", False),
        ({"a": [1, 2.5, None]}, False),
        ((1, 2), True),
        ({1: "one"}, True),
        ({"inner": (1,)}, True),
        (np.float32(1), True),
        (float("nan"), True),
        (b"bytes", True),
        ({1, 2}, True),
    ],
)
async def test_a_task_comes_back_or_is_marked(label: Any, inexact: bool) -> None:
    task = Task("Say three.", label, id="odd", seed=7, images=("a.png",), metadata={"kind": "sum"}, position=4, epoch=2)
    scene = Scene(env_class(lambda state: StepResult(1.0, terminated=True)))
    scene.ticket = replace(scene.ticket, task=task)
    scene.engine.answer = says("done")
    record = again(scene, await scene.play())
    assert record["task"].get("inexact", []) == (["label"] if inexact else [])
    if not inexact:
        assert recorded_ticket(record).task == task


async def test_records_of_older_versions_can_be_read() -> None:
    scene = Scene(env_class(lambda state: StepResult(1.0, terminated=True)))
    scene.engine.answer = says("done")
    record = again(scene, await scene.play())
    for name in ("seed", "images"):
        del record["task"][name]
    assert recorded_limits(record) is None
    assert recorded_ticket(record).task == replace(TASK, metadata={})
