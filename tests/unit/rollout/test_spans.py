"""What an episode records of its environment beside the tokens: times of tools, and images that it showed."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from agentrl import AgentInstance, Executor, ResetResult, StepResult, ToolEnv, timed
from agentrl.config.sections import changed
from agentrl.core.types import Span, Status
from agentrl.rollout.records import MAX_IMAGES, trajectory_record
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import SETTINGS, TASK, Scene, env_class, says

pytestmark = pytest.mark.anyio

LONG = changed(SETTINGS, max_new_tokens=200)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Other.
    """
    return a + b


async def slow(a: int, b: int) -> int:
    """Wait.

    Args:
        a: One.
        b: Other.
    """
    await asyncio.sleep(60)
    return 0


class Sums(ToolEnv):
    """Two calls in the first turn, then an answer."""

    tools = (add,)
    tool_prompt = ""

    def judge(self, state: Any) -> float:
        return 1.0


class Hanging(Sums):
    """A tool that gives no result in time."""

    tools = (slow,)
    tool_timeout_s = 0.05


def inside(part: Span, whole: Span) -> bool:
    return whole.start_s <= part.start_s and part.start_s + part.seconds <= whole.start_s + whole.seconds


async def test_tools_are_within_their_step_and_do_not_count_twice() -> None:
    trajectory = await Scene(Sums, ScriptedEngine(answer=says(CALL + CALL, "three")), LONG).play()
    assert trajectory.status is Status.FINISHED
    names = [(span.name, span.turn) for span in trajectory.spans]
    calls = [("tool:add", 0), ("tool:add", 0), ("step", 0)]
    assert names == [("reset", None), ("generate", 0), *calls, ("generate", 1), ("step", 1)]
    one, other, step = trajectory.spans[2:5]
    assert inside(one, step)
    assert inside(other, step)
    assert one.start_s + one.seconds <= other.start_s
    counted = [span.seconds for span in trajectory.spans if span.name in ("reset", "step")]
    assert trajectory.timings["env_s"] == pytest.approx(sum(counted), abs=1e-9)
    record = trajectory_record(Scene(Sums).group_request, trajectory)
    assert [span[:2] for span in record["spans"]] == [list(pair) for pair in names]


async def test_a_tool_that_hangs_and_a_step_that_fails_leave_their_times() -> None:
    call = CALL.replace('"add"', '"slow"')
    trajectory = await Scene(Hanging, ScriptedEngine(answer=says(call, "three")), LONG).play()
    [tool] = [span for span in trajectory.spans if span.name == "tool:slow"]
    assert tool.seconds >= 0.05

    def step(state: Any) -> StepResult:
        with timed("search"):
            raise RuntimeError("no index")

    trajectory = await Scene(env_class(step), ScriptedEngine(answer=says("a"))).play()
    assert trajectory.status is Status.ENV_ERROR
    assert [span.name for span in trajectory.spans] == ["reset", "generate", "tool:search", "step"]


async def test_tools_of_close_are_noted_with_the_last_turn() -> None:
    class Boxed(AgentInstance):
        async def step(self, state: Any) -> StepResult:
            return StepResult(1.0, "More", terminated=state.turn == 1)

        async def close(self) -> None:
            with timed("sandbox end"):
                await asyncio.sleep(0.01)

    trajectory = await Scene(Boxed, ScriptedEngine(answer=says("a", "b"))).play()
    *_, step, end = trajectory.spans
    assert (step.name, end.name, end.turn) == ("step", "tool:sandbox end", 1)
    assert step.start_s + step.seconds <= end.start_s
    assert end.start_s + end.seconds <= trajectory.timings["total_s"]


async def test_a_tool_of_an_executor_belongs_to_the_answer_before_it() -> None:
    class Agent(Executor):
        async def execute(self, task: Any, llm: Any) -> float:
            with timed("plan"):
                await asyncio.sleep(0.01)
            first = await llm.generate(llm.encode_prompt("Go"))
            with timed("search"):
                await asyncio.sleep(0.01)
            await llm.generate(first.ids + llm.encode_next("More", first))
            return 1.0

    trajectory = await Scene(Agent, ScriptedEngine(answer=says("a", "b"))).play()
    names = [(span.name, span.turn) for span in trajectory.spans]
    assert names == [("tool:plan", None), ("generate", 0), ("tool:search", 0), ("generate", 1)]
    plan, one, search, other = trajectory.spans
    assert plan.start_s + plan.seconds <= one.start_s
    assert one.start_s + one.seconds <= search.start_s
    assert search.start_s + search.seconds <= other.start_s


class Pictures(AgentInstance):
    """A picture at the beginning, and two after the first turn."""

    async def reset(self, state: Any) -> ResetResult:
        return ResetResult("Go", images=["data:image/png;base64,AA=="])

    async def step(self, state: Any) -> StepResult:
        images: list[Any] = ["board.png", b"GIF89a"]
        return StepResult(0.0, "More", images=images, terminated=state.turn == 1)


async def test_images_of_observations_are_recorded_with_the_turn_that_reads_them() -> None:
    scene = Scene(Pictures, ScriptedEngine(answer=says("a", "b")))
    scene.group_request = replace(scene.group_request, task=replace(TASK, images=("task.png",)))
    trajectory = await scene.play()
    record = trajectory_record(scene.group_request, trajectory)
    assert record["images"] == [[0, "data:image/png;base64,AA=="], [1, "board.png"], [1, "data:image/gif;base64,R0lGODlh"]]
    assert record["task"]["images"] == ["task.png"]
    assert [len(request.images) for request in scene.engine.requests] == [2, 4]
    assert "images" not in trajectory_record(scene.group_request, replace(trajectory, images=()))


async def test_images_that_would_cut_the_record_are_named_in_their_place() -> None:
    trajectory = await Scene(Pictures, ScriptedEngine(answer=says("a", "b"))).play()
    large = "data:image/png;base64," + "A" * (MAX_IMAGES - 100)
    record = trajectory_record(Scene(Pictures).group_request, replace(trajectory, images=((0, large), (1, large), (1, "b.png"))))
    assert record["images"] == [[0, large], [1, f"an image of {len(large)} characters, not recorded"], [1, "b.png"]]
