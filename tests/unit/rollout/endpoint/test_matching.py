"""Echoes of answers that a client has rewritten: the sampled tokens stand, and the change is counted and recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from agentrl import ModelEndpoint, Task
from agentrl.core.types import GroupRequest
from agentrl.learner.batch import merge_turns
from agentrl.rollout.records import recorded_turn, trajectory_record
from tests.unit.rollout.endpoint.support import ADD, TASK, caller, play_one, sampled, text_of, user

pytestmark = pytest.mark.anyio

EDIT = {"path": "a.txt", "old": " x = 1 ", "new": "x = 2\n", "count": 1000.0}
SHELL = {"command": "cd /work && ls"}


def written(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


BOTH = f"First:\n{written('edit', EDIT)}\n{written('shell', SHELL)}"
TOOLS = [tool("edit"), tool("shell")]


def arguments(place: int, change: Callable[[Any], Any]) -> Callable[[list[Any]], None]:
    """A client that changes the arguments of a call."""

    def rewrite(messages: list[Any]) -> None:
        function = messages[1]["tool_calls"][place]["function"]
        function["arguments"] = json.dumps(change(json.loads(function["arguments"])))

    return rewrite


def text(change: Callable[[str], str]) -> Callable[[list[Any]], None]:
    """A client that changes the text of an answer."""

    def rewrite(messages: list[Any]) -> None:
        messages[1]["content"] = change(messages[1]["content"])

    return rewrite


async def go_on(change: Callable[[list[Any]], None], *answers: str) -> tuple[Any, Any]:
    """Play an agent that sends an answer back with a change; the results of its calls come in the opposite order."""

    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with caller(llm) as client:

            async def ask(messages: list[Any]) -> Any:
                answer = await client.post("chat/completions", json={"model": "m", "messages": messages, "tools": TOOLS})
                return answer.json()["choices"][0]["message"]

            messages: list[Any] = [user("go")]
            messages.append(await ask(messages))
            calls = messages[1].get("tool_calls") or []
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": call["function"]["name"]} for call in reversed(calls)]
            messages += [] if calls else [user("more")]
            change(messages)
            for _ in range(2):
                messages += [await ask(messages), user("more")]
        return 1.0

    return await play_one(run, *(answers or (BOTH, "three")))


def in_order(messages: list[Any]) -> None:
    messages[2:4] = messages[3:1:-1]


@pytest.mark.parametrize(
    ("change", "rewritten"),
    [
        (lambda messages: None, False),
        (in_order, False),
        (arguments(0, lambda given: {**given, "replace_all": False}), True),
        (arguments(0, lambda given: {name: str(value).strip() for name, value in given.items()}), True),
        (arguments(0, lambda given: {**given, "count": 1000}), True),
        (arguments(1, lambda given: {"command": given["command"].removeprefix("cd /work && ")}), True),
        (lambda messages: messages[1]["tool_calls"].reverse(), True),
        (text(lambda given: ""), True),
        (text(lambda given: f"{given}\n\n"), False),
    ],
    ids=["nothing", "order of results", "default", "blanks", "number", "prefix", "order of calls", "text", "blank lines"],
)
async def test_what_a_client_rewrites_opens_no_branch(change: Callable[[list[Any]], None], rewritten: bool) -> None:
    stage, trajectory = await go_on(change)
    assert trajectory.error is None
    (row,) = merge_turns(trajectory)
    assert row.tokens.tolist() == [*stage.engine.requests[2].prompt_ids, *trajectory.turns[2].token_ids]
    assert text_of(row.tokens.tolist()).count(BOTH) == 1
    assert "<tool_response>\nedit\n</tool_response>\n<tool_response>\nshell\n</tool_response>" in text_of(row.tokens.tolist())
    assert trajectory.metrics["endpoint/rewritten_by_client"] == rewritten
    assert [bool(turn.rewritten) for turn in trajectory.turns] == [rewritten, False, False]


async def test_the_record_of_a_turn_has_what_its_client_sent_back() -> None:
    _, trajectory = await go_on(arguments(1, lambda given: {"command": "ls"}))
    (turn, *_) = trajectory_record(GroupRequest(group_id=0, task=TASK, n_samples_per_prompt=1, version=0), trajectory)["turns"]
    assert turn["rewritten"] == f"First:\n{written('edit', EDIT)}\n{written('shell', {'command': 'ls'})}"
    assert recorded_turn(turn).rewritten == turn["rewritten"]


def other_id(messages: list[Any]) -> None:
    for message in messages:
        if message.get("tool_call_id") == messages[1]["tool_calls"][0]["id"]:
            message["tool_call_id"] = "mine"
    messages[1]["tool_calls"][0]["id"] = "mine"
    arguments(0, lambda given: {**given, "path": "b.txt"})(messages)


def call_dropped(messages: list[Any]) -> None:
    del messages[1]["tool_calls"][1], messages[2]


def changed_user(messages: list[Any]) -> None:
    messages[0] = user("stop")


@pytest.mark.parametrize("change", [other_id, call_dropped, changed_user, lambda messages: messages.pop(1)])
async def test_a_deliberate_edit_is_a_branch(change: Callable[[list[Any]], None]) -> None:
    _, trajectory = await go_on(change)
    assert (trajectory.error, len(merge_turns(trajectory)) > 1) == (None, True)
    assert trajectory.metrics["endpoint/rewritten_by_client"] == 0


async def test_ids_that_a_client_leaves_out_are_not_needed() -> None:
    def without(messages: list[Any]) -> None:
        for message in messages:
            message.pop("tool_call_id", None)
            for call in message.get("tool_calls") or ():
                call.pop("id")
        arguments(0, lambda given: {**given, "old": "x = 1", "count": 1000})(messages)
        in_order(messages)

    _, trajectory = await go_on(without)
    assert (trajectory.error, len(merge_turns(trajectory)), trajectory.metrics["endpoint/rewritten_by_client"]) == (None, 1, 1)


@pytest.mark.parametrize(
    ("change", "rows", "rewritten"),
    [
        (text(lambda given: "one  two\nthree"), 1, 1),
        (text(lambda given: "two three"), 1, 1),
        (text(lambda given: "three"), 2, 0),
        (text(lambda given: "one two four"), 2, 0),
    ],
    ids=["blanks", "prefix", "only the end", "another text"],
)
async def test_texts_without_ids_may_lose_blanks_and_a_prefix(change: Callable[[list[Any]], None], rows: int, rewritten: int) -> None:
    _, trajectory = await go_on(change, "one two three", "five")
    assert (trajectory.error, len(merge_turns(trajectory))) == (None, rows)
    assert trajectory.metrics["endpoint/rewritten_by_client"] == rewritten


async def test_ids_of_other_dialects_tell_answers_with_another_text() -> None:
    async def responses(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            first = await client.responses.create(model="m", input="go")
            echoed = first.output[-1].to_dict()
            echoed["content"][0]["text"] = "short"
            await client.responses.create(model="m", input=[user("go"), echoed, user("more")])
        return 1.0

    async def messages(task: Task, llm: ModelEndpoint) -> float:
        async with llm.anthropic() as client:
            first = await client.messages.create(model="m", max_tokens=400, messages=[user("go")])
            thinking, said = (block.to_dict() for block in first.content)
            echoed = {"role": "assistant", "content": [thinking, {**said, "text": "short"}]}
            await client.messages.create(model="m", max_tokens=400, messages=[user("go"), echoed, user("more")])
        return 1.0

    for run in (responses, messages):
        _, trajectory = await play_one(run, "<think>\nHm.\n</think>\n\none two three", "five")
        assert (trajectory.error, len(merge_turns(trajectory)), trajectory.metrics["endpoint/rewritten_by_client"]) == (None, 1, 1)


async def test_a_system_message_in_mid_conversation_goes_on() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with caller(llm) as client:
            options = {"model": "m", "max_tokens": 400, "tools": [{"name": "add", "input_schema": ADD["function"]["parameters"]}]}
            messages: list[Any] = [user("one")]
            for number in range(3):
                answer = (await client.post("messages", json={**options, "messages": messages})).json()
                reminder = {"role": "system", "content": f"Reminder {number}."}
                messages += [{"role": "assistant", "content": answer["content"]}, user("more"), reminder]
        return 1.0

    _, trajectory = await play_one(run, "one", "two", "three")
    assert (trajectory.error, len(merge_turns(trajectory)), len(sampled(trajectory))) == (None, 1, 3)
