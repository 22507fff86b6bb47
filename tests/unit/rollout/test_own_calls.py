"""Tool calls in a model's own form, which its template describes and a parser reads, in every kind of environment."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Sequence
from typing import Any

import pytest

from agentrl import ModelEndpoint, Policy, StepState, Task, ToolEnv
from agentrl.config.sections import changed
from agentrl.env.agent import SamplingParams
from agentrl.env.isolation import wire
from agentrl.env.states import make_step_state
from agentrl.env.tools.calls import BadCall, ParsedText, ToolCall, parse_tool_calls
from agentrl.env.tools.environment import with_tools
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.endpoint.answers import Parts, Settled, split_thought
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.endpoint.support import caller, play_one
from tests.unit.rollout.endpoint.support import says as says_at_endpoint
from tests.unit.rollout.families import ASKED, TOOLS, family, said
from tests.unit.rollout.scenes import PATIENT, TASK, Scene
from tests.unit.rollout.test_execution import executor

pytestmark = pytest.mark.anyio

CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
BEHIND = "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
SETTINGS = changed(PATIENT, max_new_tokens=300)


class OwnCalls:
    """A parser of calls with a tag for each parameter, all of them numbers."""

    marks = None

    def parse(self, sampled: str, tools: Sequence[Any], *, reasons: bool = True) -> Parts:
        reasoning, text = split_thought(sampled) if reasons else ("", sampled)
        calls = [
            (name, json.dumps({key: int(value) for key, value in re.findall(r"<parameter=(\w+)>\n(\d+)\n", body)}))
            for name, body in re.findall(r"<function=(\w+)>(.*?)</function>", text, re.DOTALL)
        ]
        before = text.partition("<tool_call>")[0].rstrip() if calls else text
        return Parts(text=before, reasoning=reasoning, calls=tuple(calls) if tools else ())

    def settled(self, rest: str, tools: Sequence[Any], *, begins: bool, is_held: bool = False) -> Settled:
        return Settled()

    def structure(self, schema: Any, tools: Sequence[Any]) -> None:
        return None


@pytest.fixture
def codec(monkeypatch: pytest.MonkeyPatch) -> ChatCodec:
    made = ChatCodec(family("qwen3_5_nothink"))
    made.use_parser(OwnCalls(), "own", template_tools=True)
    monkeypatch.setattr("tests.unit.rollout.scenes.CODEC", made)
    return made


def engine(codec: ChatCodec, *texts: str) -> ScriptedEngine:
    def answer(request: Any) -> list[int]:
        return [*codec.encode_text(texts[int(request.request_id.rsplit("-", 1)[1])]), *codec.turn_end_ids]

    return ScriptedEngine(answer=answer, max_model_len=4096)


def add(a: int) -> int:
    """Add to two.

    Args:
        a: One.
    """
    return a + 2


class Sums(ToolEnv):
    tools = (add,)

    def judge(self, state: StepState) -> float:
        return float(state.action_text == "3")


async def test_an_environment_with_tools_runs_them(codec: ChatCodec) -> None:
    trajectory = await Scene(Sums, engine(codec, CALL, "3"), SETTINGS).play()
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    assert trajectory.metrics["tool_calls"] == 1.0
    first, second = trajectory.turns
    assert "<function=example_function_name>" in first.prompt_text
    assert "You may call tools" not in first.prompt_text
    assert BEHIND in second.prompt_text


async def test_an_executor_finds_the_calls_of_a_completion(codec: ChatCodec) -> None:
    async def play(task: Task, llm: Policy) -> float:
        first = await llm.generate(llm.encode_prompt(with_tools(task.prompt, TOOLS)))
        assert parse_tool_calls(first.text) == [ToolCall("add", {"a": 1})]
        after = llm.encode_next([said("tool", "3", name="add")], first)  # type: ignore[list-item]
        assert BEHIND in llm.decode(after)
        second = await llm.generate(first.ids + after)
        return float(second.text == "3" and parse_tool_calls(second.text) == [])

    trajectory = await Scene(executor(play), engine(codec, CALL, "3"), SETTINGS).play()
    assert (trajectory.error, trajectory.reward) == (None, 1.0)


async def test_a_client_of_the_endpoint_gets_the_calls(codec: ChatCodec) -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with caller(llm) as client:
            reply = (await client.post("/chat/completions", json={"model": "m", "messages": [ASKED], "tools": TOOLS})).json()
            called = reply["choices"][0]["message"]
            assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
            messages = [ASKED, called, said("tool", "3", tool_call_id=called["tool_calls"][0]["id"])]
            reply = (await client.post("/chat/completions", json={"model": "m", "messages": messages, "tools": TOOLS})).json()
        return float(reply["choices"][0]["message"]["content"] == "3")

    _, trajectory = await play_one(run, answer=says_at_endpoint(f"Let me see.\n{CALL}", "3", codec=codec), codec=codec)
    assert trajectory.reward == 1.0
    assert BEHIND in trajectory.turns[1].prompt_text


async def test_a_forced_call_whose_grammar_is_unknown_is_refused_with_a_remedy(codec: ChatCodec) -> None:
    problems = []

    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with caller(llm) as client:
            body = {"model": "m", "messages": [ASKED], "tools": TOOLS}
            problems.append((await client.post("/chat/completions", json={**body, "tool_choice": "required"})).text)
            await client.post("/chat/completions", json=body)
        return 1.0

    await play_one(run, answer=says_at_endpoint("3", codec=codec), codec=codec)
    assert "(--tool-parser own); --tool-parser json is" in problems[0]


def test_a_text_brings_its_calls_to_the_process_of_an_environment() -> None:
    calls = (ToolCall("add", {"a": 1}), BadCall("no"))
    state = make_step_state(
        task=TASK,
        agent="",
        turn=0,
        turns_left=1,
        observation_text="",
        action_text=ParsedText(CALL, calls),
        finish_reason="stop",
        sampling_params=SamplingParams(),
    )
    _, values = pickle.loads(wire.pack_step(state))
    arrived = wire.step_state(values, TASK)
    assert arrived.action_text == CALL
    assert parse_tool_calls(arrived.action_text) == list(calls)
    assert not isinstance(arrived.action_text.strip(), ParsedText)
