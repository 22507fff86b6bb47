"""Tools: schemas, checked arguments, limits, and the environment around them."""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl import ResetState, StepResult, StepState, Task, ToolEnv
from agentrl.core.errors import EnvLoadError
from agentrl.core.types import Status, Trajectory
from agentrl.env.isolation.system import processes
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.environment import Tool, Toolbox, ToolCallError
from agentrl.env.tools.python import python, run_python
from agentrl.suites.load import load_agent
from tests.sandboxes import needs_sandbox
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import PATIENT, Scene, says

pytestmark = pytest.mark.anyio


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def divide(a: float, b: float) -> float:
    """Divide.

    Args:
        a: The dividend.
        b: The divisor.
    """
    return a / b


async def hang(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "done"


class Sums(ToolEnv):
    tools = (add, divide, hang)
    tool_timeout_s = 0.2

    def judge(self, state: StepState) -> float:
        return float(state.action_text == "3")


async def play(cls: type[ToolEnv], *texts: str) -> Trajectory:
    settings = PATIENT  # the first schema imports transformers
    return await Scene(cls, ScriptedEngine(answer=says(*texts), max_model_len=2048), settings).play()


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


def test_the_schema_is_that_of_chat_templates() -> None:
    schema = Tool(add).schema()["function"]
    assert schema["name"] == "add"
    assert schema["description"] == "Add two numbers."
    assert schema["parameters"]["properties"]["b"] == {"type": "integer", "description": "The second."}
    assert schema["parameters"]["required"] == ["a"]


def test_arguments_by_name_in_order_and_converted() -> None:
    tool = Tool(add)
    assert tool.bind({"a": "3", "b": 4.0}) == {"a": 3, "b": 4}
    assert tool.bind([3]) == {"a": 3}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "a: Field required"),
        ({"a": "x"}, "a: Input should be a valid integer"),
        ({"a": 1.5}, "a: Input should be a valid integer"),
        ({"a": None}, "a: Input should be a valid integer"),
        ({"a": 1, "c": 2}, "c: Extra inputs"),
        ([1, 2, 3], "takes 2 arguments, not 3"),
        ([], "a: Field required"),
    ],
)
def test_arguments_that_do_not_fit(arguments: Any, problem: str) -> None:
    with pytest.raises(ToolCallError) as caught:
        Tool(add).bind(arguments)
    assert str(caught.value).startswith("add")
    assert problem in str(caught.value)


def test_hints_of_every_kind() -> None:
    def pick(json: Literal["x", "y"], _private: list[int] | None = None, copy: dict[str, float] | None = None) -> None: ...

    assert Tool(pick).bind(["x", ["1"]]) == {"json": "x", "_private": [1]}
    with pytest.raises(ToolCallError, match="json: Input should be 'x' or 'y'"):
        Tool(pick).bind({"json": "z"})


def no_hint(a) -> int:
    return 0


def only_positional(a: int, /) -> int:
    return 0


def variadic(*a: int) -> int:
    return 0


@pytest.mark.parametrize("function", [no_hint, only_positional, variadic])
def test_a_function_that_cannot_be_a_tool_is_refused_with_its_class(function: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"tool {function.__name__}: parameter a"):
        type("Bad", (ToolEnv,), {"tools": (function,)})
    path = tmp_path / "bad.py"
    path.write_text("from agentrl import ToolEnv\ndef f(a): ...\nclass Env(ToolEnv):\n    tools = (f,)\n")
    with pytest.raises(EnvLoadError, match="tool f: parameter a needs a type hint") as caught:
        load_agent(str(path))
    assert f"such as a: str (bad.py, line 2) ({path}, line 3)" in str(caught.value)


class Caller:
    def __call__(self, a: int) -> int:
        return a


def lists(a: int) -> Any:
    yield a


def no_docstring(a: int) -> int:
    return a


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        (add, "must be a tuple of functions"),
        ((5,), "tool 5: must be a function"),
        ((Caller(),), "must be a function; write a def around it"),
        ((lists,), "tool lists: is a generator"),
        ((add, add), "several tools are called add"),
    ],
)
def test_what_is_no_set_of_tools_is_refused_with_its_class(tools: Any, problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        type("Bad", (ToolEnv,), {"tools": tools})


def test_a_tool_without_a_description_is_refused_before_the_first_episode() -> None:
    cls = type("Bad", (ToolEnv,), {"tools": (no_docstring,)})
    with pytest.raises(TypeError, match=r"tool no_docstring: .* no docstring"):
        cls.preload()
    type("Good", (ToolEnv,), {"tools": (no_docstring,), "tool_prompt": "Call no_docstring."}).preload()


async def test_a_plain_function_may_give_a_coroutine() -> None:
    async def later(a: int) -> int:
        return a + 1

    def soon(a: int) -> Any:
        return later(a)

    assert (await Toolbox([soon]).run(call("soon", a=1))).text == "2"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def test_an_exception_without_text_is_told_too() -> None:
    def fails() -> None:
        raise Mute

    outcome = await Toolbox([fails]).run(call("fails"))
    assert (outcome.kind, outcome.text) == ("failed", "Error: Mute: (its message cannot be shown)")


async def test_outcomes() -> None:
    box = Toolbox([add, divide, hang], timeout_s=0.1)
    told = [await box.run(item) for item in (call("add", a=1), call("pow", a=1), call("divide", a=1, b=0), call("hang", seconds=9))]
    assert [outcome.kind for outcome in told] == ["ok", "bad_call", "failed", "failed"]
    assert [outcome.text for outcome in told] == [
        "2",
        "Error: there is no tool 'pow'; there is add, divide, hang",
        "Error: ZeroDivisionError: float division by zero",
        "Error: TimeoutError: hang gave no result within 0.1 s",
    ]


async def test_failures_are_raised_if_asked_for_but_bad_calls_are_told() -> None:
    box = Toolbox([divide, hang], timeout_s=0.1, on_failure="raise")
    with pytest.raises(ZeroDivisionError):
        await box.run(call("divide", a=1, b=0))
    with pytest.raises(TimeoutError, match="hang gave no result"):
        await box.run(call("hang", seconds=9))
    assert (await box.run(call("divide", a=1))).kind == "bad_call"


async def test_a_tool_that_blocks_holds_up_nobody() -> None:
    def block() -> None:
        time.sleep(1)

    def leave() -> None:
        raise SystemExit(3)

    start = time.monotonic()
    outcomes = await asyncio.gather(*(Toolbox([block, leave], timeout_s=0.1).run(call(name)) for name in ("block", "leave", "block")))
    assert [outcome.kind for outcome in outcomes] == ["failed"] * 3
    assert time.monotonic() - start < 0.8


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), ("a", "a"), ({"a": [1]}, '{"a": [1]}'), (Path("x"), '"x"'), ("y" * 99, "y" * 20 + "... (79 more characters)")],
)
async def test_results_as_text(value: Any, text: str) -> None:
    def get() -> Any:
        return value

    assert (await Toolbox([get], max_output_chars=20).run(call("get"))).text == text


@settings(suppress_health_check=[HealthCheck.too_slow])  # which a busy machine fails
@given(
    name=st.sampled_from(["add", "divide", "x"]),
    arguments=st.dictionaries(st.sampled_from("abc"), st.none() | st.text() | st.integers() | st.floats()),
)
def test_no_arguments_whatever_raise(name: str, arguments: dict[str, Any]) -> None:
    assert isinstance(asyncio.run(Toolbox([add, divide]).run(ToolCall(name, arguments))).text, str)


def reset(cls: type[ToolEnv], prompt: Any) -> Any:
    task = Task(prompt)
    return cls().reset(ResetState(task=task, observation=prompt, label=None, seed=0)).observation


def test_the_first_message_offers_the_tools() -> None:
    (user,) = reset(Sums, "1+2?")
    assert (user["role"], user["content"]) == ("user", "1+2?")
    assert [tool["function"]["name"] for tool in user["tools"]] == ["add", "divide", "hang"]
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"}]
    system, second = reset(Sums, own)
    assert (system["content"], "tools" in system, second) == ("Be brief.", True, own[1])
    assert "tools" not in own[0]


def test_a_description_of_ones_own_takes_its_place() -> None:
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"}]
    system, user = reset(type("Own", (Sums,), {"tool_prompt": "Write add(a, b)."}), own)
    assert (system, user) == ({"role": "system", "content": "Be brief.\n\nWrite add(a, b)."}, own[1])
    assert reset(type("Own", (Sums,), {"tool_prompt": ""}), own) is None


async def test_every_call_gets_its_own_message() -> None:
    texts = ['{"tool":"add","args":[1,2]} {"tool":"pow"}', '{"tool":"divide","args":[1,0]}', '{"tool":"add","args":[1', "3"]
    env = Sums()
    first, second, third, last = [await env.step(StepState(action_text=text)) for text in texts]
    assert first.observation == [
        {"role": "tool", "content": "3", "name": "add"},
        {"role": "tool", "content": "Error: there is no tool 'pow'; there is add, divide, hang", "name": "pow"},
    ]
    assert first.info == {"tool_calls": 2.0, "bad_calls": 1.0, "failed_calls": 0.0}
    assert second.info["failed_calls"] == third.info["bad_calls"] == 1.0
    assert third.observation[0]["content"].startswith("Error: the call is not valid JSON")
    assert last == StepResult(1.0, terminated=True)


async def test_more_calls_than_allowed_are_refused() -> None:
    cls = type("Few", (Sums,), {"max_calls": 1})
    result = await cls().step(StepState(action_text='{"tool":"add","args":[1]}' * 3))
    assert [message["content"] for message in result.observation] == ["2", *["Error: only 1 calls are run in one turn"] * 2]


async def test_judges_of_every_kind() -> None:
    async def later(self: Any, state: StepState) -> dict[str, Any]:
        return {"rewards": 0.5, "environment_feedback": "again"}

    assert await type("A", (Sums,), {"judge": later})().step(StepState(action_text="x")) == {
        "rewards": 0.5,
        "environment_feedback": "again",
    }
    going_on = StepResult(0.0, "more")
    assert await type("B", (Sums,), {"judge": lambda self, state: going_on})().step(StepState(action_text="x")) is going_on


async def test_tools_that_share_the_episodes_state() -> None:
    class Notes(ToolEnv):
        tool_prompt = ""

        def __init__(self) -> None:
            self.notes: list[str] = []

        def write(self, note: str) -> int:
            """Write a note."""
            self.notes.append(note)
            return len(self.notes)

        def list_tools(self) -> Any:
            return (self.write,)

    env = Notes()
    for _ in range(2):
        result = await env.step(StepState(action_text='{"tool":"write","args":["x"]}'))
    assert result.observation[0]["content"] == "2"
    assert Notes().notes == []


async def test_an_episode_with_a_tool() -> None:
    trajectory = await play(Sums, '{"tool":"add","args":[1,2]}', "3")
    assert trajectory.status is Status.FINISHED
    assert trajectory.reward == 1.0
    assert "3" in trajectory.turns[1].prompt_text


async def test_failures_raised_or_told_in_an_episode() -> None:
    texts = ('{"tool":"divide","args":[1,0]}', "3")
    assert (await play(Sums, *texts)).status is Status.FINISHED
    trajectory = await play(type("Strict", (Sums,), {"on_tool_failure": "raise"}), *texts)
    assert (trajectory.status, trajectory.reward) == (Status.ENV_ERROR, None)
    assert "ZeroDivisionError" in (trajectory.error or "")


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(6*7)", "42"),
        ("", ""),
        ("import sys; sys.exit('bye')", "bye"),
        ("import os; print(sorted(set(os.environ) - {'PATH', 'HOME', 'PWD', 'LC_CTYPE'}), os.listdir())", "[] []"),
        ("print('é')", "é"),
    ],
)
async def test_python_prints(code: str, output: str) -> None:
    assert await python(code) == output


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("1/0", "ZeroDivisionError: division by zero"),
        ("print('a', flush=True)\nwhile True: pass", "a\n[stopped after 0.5 s]"),
        ("while True: print('x' * 1000)", "[stopped after 16384 bytes of output]"),
        ("x = 'a' * 10**10", "MemoryError"),
        ("import os; os.abort()", "[ended by SIGABRT]"),
    ],
)
async def test_python_is_stopped(code: str, ending: str) -> None:
    output = await run_python(code, timeout_s=0.5)
    assert output.endswith(ending)
    assert len(output) < 17_000


@needs_sandbox
async def test_children_of_the_code_are_killed_with_it() -> None:
    output = await run_python("import os\nif os.fork() == 0:\n    os.setsid()\n    os.execlp('sleep', 'sleep', '3573')\nprint('done')")
    assert output == "done"
    assert not [pid for pid in processes() if b"3573" in command_line(pid).split(b"\0")]


def command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
