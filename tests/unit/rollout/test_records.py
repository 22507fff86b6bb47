"""Trajectories as JSON and back."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentrl import StepResult, Task
from agentrl.core.protocols import EngineLimits
from agentrl.core.types import Status, Trajectory
from agentrl.rollout.records import inexact_parts, recorded_group_request, recorded_limits, recorded_turn, trajectory_record
from agentrl.track.jsonl import encode
from tests.unit.rollout.scenes import CODEC, TASK, Scene, env_class, says

pytestmark = pytest.mark.anyio


def again(scene: Scene, trajectory: Trajectory, limits: EngineLimits | None = None) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(encode(trajectory_record(scene.group_request, trajectory, limits)))
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
    assert CODEC.decode(recorded_turn(record["unanswered"]).token_ids.tolist()) == "fatal<|im_end|>"
    assert trajectory.num_tokens == len(trajectory.turns[0].token_ids)


async def test_an_answered_episode_has_no_unanswered_turn() -> None:
    scene = Scene(env_class(lambda state: StepResult(1.0, terminated=True)))
    scene.engine.answer = says("done")
    record = again(scene, await scene.play(), EngineLimits(max_model_len=64, end_token_ids=(3, 4)))
    assert "unanswered" not in record
    assert recorded_limits(record) == EngineLimits(max_model_len=64, end_token_ids=(3, 4))


@pytest.mark.parametrize(
    "label",
    [
        *("three", {"a": [1, 2.5, None]}, ("add", [1, 2]), {1: "one"}, {"inner": (1,)}, b"bytes", {1, 2}, set(), (), "it's \x1b"),
        [True, -0.0, 1e300, 10**30],
    ],
)
async def test_a_task_comes_back_as_it_was(label: Any) -> None:
    task = Task("Say three.", label, id="odd", seed=7, images=("a.png",), metadata={"kind": "sum"}, position=4, epoch=2)
    record = await recorded(task)
    assert inexact_parts(record) == []
    assert recorded_group_request(record).task == task
    assert repr(recorded_group_request(record).task) == repr(task)


@pytest.mark.parametrize("label", [np.float32(1), float("nan"), frozenset({1}), [object()], type("Text", (str,), {})("a")])
async def test_what_cannot_be_recorded_is_named(label: Any) -> None:
    assert inexact_parts(await recorded(Task("Say three.", label, id="odd"))) == ["label"]


async def recorded(task: Task) -> dict[str, Any]:
    scene = Scene(env_class(lambda state: StepResult(1.0, terminated=True)))
    scene.group_request = replace(scene.group_request, task=task)
    scene.engine.answer = says("done")
    return again(scene, await scene.play())


async def test_records_of_older_versions_can_be_read() -> None:
    scene = Scene(env_class(lambda state: StepResult(1.0, terminated=True)))
    scene.engine.answer = says("done")
    record = again(scene, await scene.play())
    for name in ("seed", "images"):
        del record["task"][name]
    assert recorded_limits(record) is None
    assert recorded_group_request(record).task == replace(TASK, metadata={})
