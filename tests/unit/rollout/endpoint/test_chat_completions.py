"""Chat Completions with OpenAI's own SDK: what was sampled is what is trained."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from agentrl import BlackBoxAgent, ModelEndpoint, Task
from agentrl.core.types import Status
from agentrl.learner.batch import merge_turns
from tests.unit.rollout.endpoint.support import ADD, CALL, play, play_one, text_of, user

pytestmark = pytest.mark.anyio


async def two_turns(task: Task, llm: ModelEndpoint, **options: Any) -> float:
    async with llm.openai() as client:
        messages: list[Any] = [{"role": "system", "content": "Use tools."}, user(str(task.prompt))]
        first = (await client.chat.completions.create(model="policy", messages=messages, tools=[ADD], **options)).choices[0]
        assert (first.finish_reason, first.message.content) == ("tool_calls", None)
        call = first.message.tool_calls[0]
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1, "b": 2}')
        messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        second = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD], **options)
        return float(second.choices[0].message.content == "three")


async def test_a_tool_conversation_is_one_row_of_exactly_what_the_engine_saw() -> None:
    stage, trajectory = await play_one(two_turns, CALL, "three")
    first, second = stage.engine.requests
    assert second.prompt_ids[: len(first.prompt_ids)].tolist() == first.prompt_ids.tolist()
    assert '"name": "add"' in text_of(first.prompt_ids)
    assert text_of(second.prompt_ids).endswith(
        f"assistant\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    (row,) = merge_turns(trajectory)
    assert row.tokens.tolist() == [*second.prompt_ids, *trajectory.turns[1].token_ids]
    logprobs = [float(p) for turn in row.turns for p in turn.logprobs]
    assert logprobs == [-(token % 7 + 1) / 8 for turn in trajectory.turns for token in turn.token_ids]
    assert (trajectory.status, trajectory.reward, trajectory.score, trajectory.error) == (Status.FINISHED, 1.0, 1.0, None)
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0]
    assert trajectory.metrics["endpoint/requests"] == 2
    assert trajectory.metrics["endpoint/branches"] == 1
    assert trajectory.metrics["endpoint/delivered"] == 1


async def test_a_plain_def_with_a_blocking_client_runs_on_a_thread() -> None:
    class Plain(BlackBoxAgent):
        def run(self, task: Task, llm: ModelEndpoint) -> float:
            with llm.openai(sync=True) as client:
                answer = client.chat.completions.create(model="other-name", messages=[user(str(task.prompt))])
            assert (answer.model, answer.choices[0].finish_reason) == ("other-name", "stop")
            return float(answer.choices[0].message.content == "three")

    _, trajectory = await play_one(Plain, "three")
    assert trajectory.reward == 1.0


async def test_streamed_answers_are_recorded_as_plain_ones() -> None:
    async def streamed(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            messages: list[Any] = [user(str(task.prompt))]
            async with client.chat.completions.stream(model="policy", messages=messages, tools=[ADD]) as stream:
                first = (await stream.get_final_completion()).choices[0].message
            messages += [first.to_dict(), {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "3"}]
            text, usage = "", None
            stream = await client.chat.completions.create(
                model="policy", messages=messages, tools=[ADD], stream=True, stream_options={"include_usage": True}
            )
            async for chunk in stream:
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                usage = chunk.usage or usage
            assert usage.completion_tokens > 0
            return float(text == "three " * 40)

    stage, trajectory = await play_one(streamed, CALL, "three " * 40)
    assert trajectory.error is None
    assert (trajectory.reward, len(merge_turns(trajectory))) == (1.0, 1)
    assert (
        stage.engine.requests[1].prompt_ids[: len(stage.engine.requests[0].prompt_ids)].tolist()
        == stage.engine.requests[0].prompt_ids.tolist()
    )


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": [ADD]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [ADD]}, "tool_choice"),
        ({"response_format": {"type": "regex"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "sum"}}}, "response_format"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"extra_body": {"best_of": 3}}, "best_of"),
        ({"extra_body": {"stream_options": "all"}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "critic", "content": "?"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": "a" * 1001}, "stop"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(options: dict[str, Any], field: str) -> None:
    seen: list[openai.APIStatusError] = []

    async def refused(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            with pytest.raises(openai.BadRequestError) as raised:
                await client.chat.completions.create(**{"model": "policy", "messages": [user("?")], **options})
            seen.append(raised.value)
        return 1.0

    _, trajectory = await play_one(refused, "three")
    assert (seen[0].param, field in seen[0].message) == (field, True)
    assert trajectory.status is Status.ENV_ERROR
    assert "refused, the last with 400" in (trajectory.error or "")
    assert trajectory.metrics["endpoint/refused"] == 1


async def test_limits_stop_strings_and_options_that_change_nothing_are_taken() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            create = client.chat.completions.create
            cut = await create(model="m", messages=[user("?")], max_tokens=1, temperature=0.3, store=True, n=1, user="me")
            assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 1)
            stopped = await create(model="m", messages=[user("!")], stop=["one"])
            assert stopped.choices[0].message.content == "three "
            again = [user("!"), {"role": "assistant", "content": "three"}, user("And?")]
            await create(model="m", messages=again, stop=["one"])
        return 1.0

    stage, trajectory = await play_one(run, "three four", "three one", "three")
    assert [request.sampling.stop for request in stage.engine.requests] == [(), ("one",), ("one",)]
    assert [request.sampling.temperature for request in stage.engine.requests] == [1.0] * 3
    assert len(merge_turns(trajectory)) == 2


async def test_a_prompt_that_is_too_long_is_refused_in_the_words_of_the_service() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens") as raised:
                await client.chat.completions.create(model="m", messages=[user("one " * 900)])
            assert raised.value.code == "context_length_exceeded"
            await client.chat.completions.create(model="m", messages=[user("one")])
        return 0.5

    _, trajectory = await play_one(run, "three", max_model_len=256)
    assert (trajectory.status, trajectory.reward) == (Status.FINISHED, 0.5)


async def test_rewards_by_answer_and_by_branch() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> dict[str, float]:
        async with llm.openai() as client, llm.branch("critic").openai() as critic:
            first = await client.chat.completions.create(model="m", messages=[user("one")])
            await critic.chat.completions.create(model="m", messages=[user("two")])
            messages: list[Any] = [user("one"), first.choices[0].message, user("more")]
            await client.chat.completions.create(model="m", messages=messages)
        return {first.id: 0.25, "critic": 2.0}

    _, (main, critic) = await play(run, "three")
    assert (main.agent, critic.agent) == ("", "critic")
    assert ([turn.reward for turn in main.turns], main.reward) == ([0.25, 0.0], 0.25)
    assert ([turn.reward for turn in critic.turns], critic.reward, critic.score) == ([2.0], 2.0, 1.0)
    assert main.episode_id == critic.episode_id


async def test_a_reward_for_an_unknown_branch_is_an_error() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> dict[str, float]:
        async with llm.openai() as client:
            await client.chat.completions.create(model="m", messages=[user("one")])
        return {"nobody": 1.0}

    _, trajectory = await play_one(run, "three")
    assert trajectory.status is Status.ENV_ERROR
    assert "rewards['nobody']" in (trajectory.error or "")


async def test_the_score_is_taken_before_the_penalties_for_length() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            await client.chat.completions.create(model="m", messages=[user("one")])
        return 1.0

    _, trajectory = await play_one(run, answer=lambda request: [20] * 30, max_new_tokens=8, stop_properly_penalty=0.25)
    assert (trajectory.error, trajectory.reward, trajectory.score) == (None, 0.25, 1.0)
