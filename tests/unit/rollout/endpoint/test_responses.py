"""Responses with OpenAI's own SDK."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from agentrl import ModelEndpoint, Task
from agentrl.learner.batch import merge_turns
from tests.unit.rollout.endpoint.support import ADD, CALL, play_one, text_of, user

pytestmark = pytest.mark.anyio

TOOL: dict[str, Any] = {"type": "function", "strict": True, **ADD["function"]}
OPTIONS: dict[str, Any] = {"model": "policy", "tools": [TOOL], "instructions": "Use tools."}


def outputs(*items: Any) -> list[Any]:
    return [{"type": "function_call_output", "call_id": item.call_id, "output": "3"} for item in items if item.type == "function_call"]


async def test_a_tool_conversation_is_one_row() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            first = await client.responses.create(input="1+2?", store=False, include=["reasoning.encrypted_content"], **OPTIONS)
            thought, call = first.output
            assert (thought.summary[0].text, call.name, call.arguments) == ("Hm.", "add", '{"a": 1, "b": 2}')
            history = [{"type": "message", **user("1+2?")}, *first.output, *outputs(*first.output)]
            second = await client.responses.create(input=history, **OPTIONS)
            assert (second.status, second.output_text) == ("completed", "three")
            assert second.usage.total_tokens == second.usage.input_tokens + second.usage.output_tokens
        return 1.0

    stage, trajectory = await play_one(run, f"<think>\nHm.\n</think>\n\n{CALL}", "three")
    assert (trajectory.error, len(merge_turns(trajectory))) == (None, 1)
    assert "<think>\nHm.\n</think>" in text_of(stage.engine.requests[1].prompt_ids)


@pytest.mark.parametrize("interleaved", [False, True])
async def test_streams_and_parallel_calls(interleaved: bool) -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            async with client.responses.stream(input="1+2?", **OPTIONS) as stream:
                first = await stream.get_final_response()
            said, one, two = first.output
            assert said.content[0].text == "Both:"
            answered = [one, *outputs(one), two, *outputs(two)] if interleaved else [one, two, *outputs(one, two)]
            history: list[Any] = [user("1+2?"), said, *answered]
            async with client.responses.stream(input=history, **OPTIONS) as stream:
                kinds = [event.type async for event in stream]
                last = await stream.get_final_response()
            assert (kinds[0], kinds[-1], last.output_text) == ("response.created", "response.completed", "three " * 30)
        return 1.0

    stage, trajectory = await play_one(run, f"Both:\n{CALL}\n{CALL}", "three " * 30)
    assert (trajectory.error, len(merge_turns(trajectory))) == (None, 1)
    assert text_of(stage.engine.requests[1].prompt_ids).count("<tool_response>\n3\n</tool_response>") == 2


async def test_previous_response_id_sends_only_what_is_new() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            first = await client.responses.create(input="1+2?", **OPTIONS)
            new = outputs(*first.output)
            second = await client.responses.create(input=new, previous_response_id=first.id, **OPTIONS)
            await client.responses.create(input="Sure?", previous_response_id=second.id, **OPTIONS)
            await client.responses.create(input="Or?", previous_response_id=second.id, **OPTIONS)
            with pytest.raises(openai.BadRequestError) as raised:
                await client.responses.create(input="?", previous_response_id="resp_x", model="m")
            assert (raised.value.code, raised.value.param) == ("previous_response_not_found", "previous_response_id")
        return 1.0

    _, trajectory = await play_one(run, CALL, "three")
    assert (trajectory.error, [len(row.turns) for row in merge_turns(trajectory)]) == (None, [3, 1])
    assert trajectory.metrics["endpoint/branches/forked"] == 1


async def test_namespaces_custom_tools_and_hosted_tools() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            shell = {"type": "custom", "name": "shell", "description": "Run."}
            tools: list[Any] = [{"type": "namespace", "name": "crm", "description": "x", "tools": [TOOL, shell]}, {"type": "web_search"}]
            first = await client.responses.create(input="?", model="m", tools=tools)
            function, custom = first.output
            assert (function.type, function.namespace, function.name) == ("function_call", "crm", "add")
            assert (custom.type, custom.namespace, custom.name, custom.input) == ("custom_tool_call", "crm", "shell", "ls -l")
            done = {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": [{"type": "input_text", "text": "a.txt"}]}
            history: list[Any] = [user("?"), *first.output, *outputs(function), done]
            await client.responses.create(input=history, model="m", tools=tools)
        return 1.0

    calls = [CALL.replace("add", "crm.add"), '<tool_call>\n{"name": "crm.shell", "arguments": {"input": "ls -l"}}\n</tool_call>']
    _, trajectory = await play_one(run, "\n".join(calls), "three")
    assert (trajectory.error, len(merge_turns(trajectory))) == (None, 1)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0].type"),
        ({"text": {"format": {"type": "regex"}}}, "text.format.type"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input[0].content[0].type"),
        ({"extra_body": {"best_of": 2}}, "best_of"),
        ({"extra_body": {"text": "json"}}, "text"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(options: dict[str, Any], field: str) -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            with pytest.raises(openai.BadRequestError) as raised:
                await client.responses.create(**{**OPTIONS, "input": "?", **options})
            assert raised.value.param == field
            cut = await client.responses.create(input="?", max_output_tokens=1, **OPTIONS)
            assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        return 1.0

    _, trajectory = await play_one(run, "three four")
    assert (trajectory.error, trajectory.metrics["endpoint/refused"]) == (None, 1.0)
