"""``agentrl inspect`` shows the branches of an episode and why they were opened."""

import io
from typing import Any

import pytest
from rich.console import Console

from agentrl.core.types import Group, GroupRequest
from agentrl.inspect.episodes import show_episode
from agentrl.rollout.records import group_records, recorded_turn
from agentrl.track.text import Screen
from tests.unit.rollout.endpoint.support import TASK, play_one, user

pytestmark = pytest.mark.anyio


async def record(run: Any, *texts: str) -> dict[str, Any]:
    _, trajectory = await play_one(run, *texts)
    group_request = GroupRequest(group_id=3, task=TASK, n_samples_per_prompt=1, version=0, record=1)
    (found,) = group_records(group_request, Group(group_id=3, task=TASK, trajectories=(trajectory,)), None)
    return dict(found)


def shown(found: dict[str, Any]) -> str:
    out = io.StringIO()
    show_episode(Screen(Console(file=out, width=160)), [found], None)
    return out.getvalue()


async def with_a_helper(task: Any, llm: Any) -> float:
    async with llm.openai() as client:
        first = await client.chat.completions.create(model="policy", messages=[user("What is 1+2?")])
        await client.chat.completions.create(model="policy", messages=[user("Is that right?")])
        said = {"role": "assistant", "content": first.choices[0].message.content}
        await client.chat.completions.create(model="policy", messages=[user("What is 1+2?"), said, user("Sure?")])
    return 1.0


async def test_every_branch_has_a_row_and_its_turns_name_it() -> None:
    found = await record(with_a_helper, "three", "yes", "sure")
    assert [turn.get("branch_reason", "") for turn in found["turns"]] == ["", "", "sub-agent"]
    assert [recorded_turn(turn).branch_reason for turn in found["turns"]] == ["", "", "sub-agent"]
    text = shown(found)
    assert "branch 1  2 turns" in text
    assert "branch 2  1 turn opened because of 'sub-agent'" in text
    assert text.index("turn 1  branch 1") < text.index("turn 2  branch 2") < text.index("turn 3  branch 1")


async def test_an_episode_with_one_branch_names_none() -> None:
    async def once(task: Any, llm: Any) -> float:
        async with llm.openai() as client:
            await client.chat.completions.create(model="policy", messages=[user("What is 1+2?")])
        return 1.0

    assert "branch" not in shown(await record(once, "three")).replace("endpoint/branches", "")


async def test_helpers_and_rewritten_answers_are_shown() -> None:
    async def run(task: Any, llm: Any) -> float:
        async with llm.openai() as client:
            tools = [{"type": "function", "function": {"name": "add"}}]
            await client.chat.completions.create(model="m", messages=[user("Give this a title.")])
            first = (await client.chat.completions.create(model="m", messages=[user("1+2?")], tools=tools)).choices[0].message.to_dict()
            first["tool_calls"][0]["function"]["arguments"] = '{"a": 2}'
            result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "3"}
            await client.chat.completions.create(model="m", messages=[user("1+2?"), first, result], tools=tools)
        return 1.0

    found = await record(run, "A sum", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "three")
    assert [recorded_turn(turn).helper for turn in found["turns"]] == ["asks for a title or a summary", "", ""]
    text = shown(found)
    assert "branch 1  1 turn, a helper's: asks for a title or a summary" in text
    assert 'rewritten by the client <tool_call>\n{"name": "add", "arguments": {"a": 2}}' in text.replace("\n    ", "\n")
