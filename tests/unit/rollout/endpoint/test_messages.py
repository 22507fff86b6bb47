"""Messages with Anthropic's own SDK."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from agentrl import ModelEndpoint, Task
from agentrl.learner.batch import merge_turns
from tests.unit.rollout.endpoint.support import ADD, CALL, play_one, text_of, user

pytestmark = pytest.mark.anyio

TOOL = {"name": "add", "description": "Add two numbers.", "input_schema": ADD["function"]["parameters"]}
OPTIONS: dict[str, Any] = {"model": "policy", "max_tokens": 400, "tools": [TOOL]}


def results(*blocks: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "3"} for block in blocks if block.type == "tool_use"],
    }


async def test_a_tool_conversation_is_one_row() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.anthropic() as client:
            system: list[Any] = [{"type": "text", "text": "Use tools.", "cache_control": {"type": "ephemeral"}}]
            asked = {"role": "user", "content": [{"type": "text", "text": "1+2?", "cache_control": {"type": "ephemeral"}}]}
            first = await client.messages.create(messages=[asked], system=system, **OPTIONS)
            thinking, call = first.content
            assert (first.stop_reason, thinking.thinking, call.name, call.input) == ("tool_use", "Hm.", "add", {"a": 1, "b": 2})
            messages = [user("1+2?"), {"role": "assistant", "content": first.content}, results(*first.content)]
            assert (await client.messages.count_tokens(messages=messages, system="Use tools.", model="m", tools=[TOOL])).input_tokens > 20
            second = await client.messages.create(messages=messages, system="Use tools.", **OPTIONS)
            assert (second.stop_reason, second.content[0].text, second.usage.output_tokens > 0) == ("end_turn", "three", True)
        return 1.0

    stage, trajectory = await play_one(run, f"<think>\nHm.\n</think>\n\n{CALL}", "three")
    assert (trajectory.error, len(merge_turns(trajectory))) == (None, 1)
    assert "<think>\nHm.\n</think>" in text_of(stage.engine.requests[1].prompt_ids)


async def test_streams_and_parallel_calls() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.anthropic() as client:
            async with client.messages.stream(messages=[user("1+2?")], **OPTIONS) as stream:
                first = await stream.get_final_message()
            assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
            messages: list[Any] = [user("1+2?"), {"role": "assistant", "content": first.content}, results(*first.content)]
            messages[2]["content"][1] |= {"content": [{"type": "text", "text": "failed"}], "is_error": True}
            messages[2]["content"].append({"type": "text", "text": "Go on."})
            async with client.messages.stream(messages=messages, **OPTIONS) as stream:
                assert await stream.get_final_text() == "three"
        return 1.0

    stage, trajectory = await play_one(run, f"Both:\n{CALL}\n{CALL}", "three")
    assert (trajectory.error, len(merge_turns(trajectory))) == (None, 1)
    end = text_of(stage.engine.requests[1].prompt_ids).rpartition(CALL)[2]
    assert end == (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\nfailed\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_thread_sends_only_what_is_new() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.anthropic() as client:
            create = client.beta.messages.create
            first = await create(messages=[user("1+2?")], system="Add.", thread={"type": "create"}, **OPTIONS)
            follow: Any = {"type": "continue", "previous_message_id": first.id}
            await create(messages=[results(*first.content)], thread=follow, model="m", max_tokens=9)
            with pytest.raises(anthropic.NotFoundError) as raised:
                await create(messages=[user("?")], thread={"type": "continue", "previous_message_id": "msg_x"}, model="m", max_tokens=9)
            assert raised.value.error_code == "thread_not_found"
        return 1.0

    _, trajectory = await play_one(run, CALL, "three")
    assert (trajectory.error, len(merge_turns(trajectory)), len(trajectory.turns)) == (None, 1, 2)


async def test_the_tool_runner_of_the_sdk() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        @anthropic.beta_async_tool
        async def add(a: int, b: int) -> str:
            """Add two numbers."""
            return str(a + b)

        async with llm.anthropic() as client:
            runner = client.beta.messages.tool_runner(model="m", max_tokens=400, tools=[add], messages=[user("1+2?")])
            last = await runner.until_done()
        return float(last.content[0].text == "three")

    _, trajectory = await play_one(run, CALL, CALL, "three")
    assert (trajectory.error, trajectory.reward, len(merge_turns(trajectory)), len(trajectory.turns)) == (None, 1.0, 1, 3)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice.type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format.type"),
        ({"extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}}, "context_management.edits[0].type"),
        ({"messages": [user("?"), {"role": "assistant", "content": "It"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"extra_body": {"best_of": 2}}, "best_of"),
        ({"extra_body": {"output_config": "json"}}, "output_config"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(options: dict[str, Any], field: str) -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.anthropic() as client:
            with pytest.raises(anthropic.BadRequestError) as raised:
                await client.messages.create(**{**OPTIONS, "messages": [user("?")], **options})
            assert raised.value.type == "invalid_request_error"
            assert field in str(raised.value)
            await client.messages.create(messages=[user("?")], **OPTIONS)
        return 1.0

    _, trajectory = await play_one(run, "three")
    assert (trajectory.error, trajectory.metrics["endpoint/refused"]) == (None, 1.0)


async def test_errors_come_in_the_form_of_the_service() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.anthropic() as client, llm.anthropic(max_retries=0) as stranger:
            with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 256 maximum"):
                await client.messages.create(messages=[user("one " * 900)], model="m", max_tokens=5)
            stranger.api_key = "agentrl-1-wrong"
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.create(messages=[user("?")], model="m", max_tokens=5)
            assert [model.id async for model in client.models.list()] == ["policy"]
            assert (await client.models.retrieve("some/model")).id == "policy"  # any name is taken
            await client.messages.create(messages=[user("?")], model="m", max_tokens=5)
        return 1.0

    _, trajectory = await play_one(run, "three", max_model_len=256)
    assert trajectory.error is None
