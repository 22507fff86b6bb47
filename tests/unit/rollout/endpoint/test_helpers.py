"""Conversations of helpers: told from agents by their tools and prompts, recorded, and left out by ``--train-branches agent``."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl import ModelEndpoint, Task
from agentrl.learner.batch import merge_turns
from tests.unit.rollout.endpoint.support import ADD, CALL, caller, play_one, user

pytestmark = pytest.mark.anyio

TITLES = {"role": "system", "content": "You name threads. Write a title of at most five words."}
PLANS = {"role": "system", "content": "You plan."}
NO_TOOLS = "has no tools, and others of the episode have"


async def ask(llm: ModelEndpoint, *bodies: dict[str, Any]) -> None:
    async with caller(llm) as client:
        for body in bodies:
            assert (await client.post("chat/completions", json={"model": "m", **body})).status_code == 200


def agent_of(*bodies: dict[str, Any], **named: dict[str, Any]) -> Any:
    """An agent that calls a tool and goes on, and sends these requests besides, some of them from branches with names."""

    async def run(task: Task, llm: ModelEndpoint) -> float:
        await ask(llm, *bodies)
        for name, body in named.items():
            await ask(llm.branch(name), body)
        async with caller(llm) as client:
            body: dict[str, Any] = {"model": "m", "messages": [user("1+2?")], "tools": [ADD]}
            message = (await client.post("chat/completions", json=body)).json()["choices"][0]["message"]
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
            assert (await client.post("chat/completions", json={**body, "messages": [user("1+2?"), message, result]})).status_code == 200
        return 1.0

    return run


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": [TITLES, user("Fix the tests.")]}, "asks for a title or a summary"),
        ({"messages": [user("go"), {"role": "assistant", "content": "ok"}, user("Summarize the above.")]}, "asks for a title or a summary"),
        ({"messages": [user("quota")], "max_tokens": 1}, "asks for one token only"),
        ({"messages": [user("quota")], "max_tokens": 1, "tools": [ADD]}, "asks for one token only"),
        ({"messages": [PLANS, user("Is this command safe?")]}, NO_TOOLS),
        ({"messages": [user("Write a title."), {"role": "assistant", "content": "ok"}, user("more")]}, ""),
        ({"messages": [PLANS, user("Search for a title.")], "tools": [ADD]}, ""),
    ],
)
async def test_helpers_are_told_from_agents(body: dict[str, Any], reason: str) -> None:
    _, trajectory = await play_one(agent_of(body), CALL, train_branches="agent")
    assert trajectory.error is None
    first, *others = trajectory.turns
    assert (first.helper, [turn.helper for turn in others]) == (reason, ["", ""])
    assert (first.masked, [turn.masked for turn in others]) == ("not selected" if reason else "", ["", ""])
    assert [len(row.turns) for row in merge_turns(trajectory)] == ([2] if reason else [1, 2])
    assert trajectory.metrics["endpoint/helpers"] == bool(reason)


async def test_all_branches_are_trained_without_the_setting() -> None:
    _, trajectory = await play_one(agent_of({"messages": [TITLES, user("Fix the tests.")]}), CALL)
    assert [len(row.turns) for row in merge_turns(trajectory)] == [1, 2]
    assert (trajectory.turns[0].helper, trajectory.metrics["endpoint/helpers"]) == ("asks for a title or a summary", 1)


async def test_a_branch_with_a_name_is_an_agents() -> None:
    _, trajectory = await play_one(agent_of(planner={"messages": [PLANS, user("What now?")]}), CALL, train_branches="agent")
    assert [len(row.turns) for row in merge_turns(trajectory)] == [1, 2]


async def test_without_any_agent_all_conversations_are_agents() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        await ask(llm, {"messages": [user("Summarize this.")]}, {"messages": [TITLES, user("Fix the tests.")]})
        return 1.0

    _, trajectory = await play_one(run, "three", train_branches="agent")
    assert (trajectory.error, len(merge_turns(trajectory)), trajectory.metrics["endpoint/helpers"]) == (None, 2, 0)
