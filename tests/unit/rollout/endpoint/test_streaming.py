"""Tokens reach clients as they are sampled, in the three dialects, and what is recorded is the same as without streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from agentrl import ModelEndpoint, Task
from agentrl.core.errors import EngineError
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import FinishReason, Generation
from agentrl.learner.batch import merge_turns
from agentrl.rollout.endpoint import delivery
from agentrl.rollout.endpoint.server import EndpointServer
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.endpoint.support import ADD, CALL, CODEC, SETTINGS, Stage, agent, caller, play, play_one, says, user

pytestmark = pytest.mark.anyio

STEP_S = 0.002
BODY: dict[str, Any] = {"model": "m", "messages": [user("one")], "stream": True}
THINKS = f"<think>\nHm, so.\n</think>\n\nBoth, then:\n{CALL}\n{CALL}"
SCHEMA = ADD["function"]["parameters"]


@dataclass(slots=True)
class SteppedEngine(ScriptedEngine):
    """Gives every request under way one token in each step, which the test takes."""

    steps: int = 0
    waiting: dict[str, asyncio.Queue[None]] = field(default_factory=dict)

    async def generate(self, request: GenerationRequest) -> Generation:
        answer = self.answer(request)
        assert not isinstance(answer, BaseException)
        steps = self.waiting[request.request_id] = asyncio.Queue()
        for token in answer:
            await steps.get()
            if request.on_tokens is not None:
                request.on_tokens([token])
        del self.waiting[request.request_id]
        return self._generation(list(answer), len(answer), request)

    async def step(self) -> None:
        """Take one decoding step, and let the tokens reach the clients."""
        self.steps += 1
        for steps in self.waiting.values():
            steps.put_nowait(None)
        await asyncio.sleep(0.05)


async def chat(client: Any, question: str, stream: bool, seen: Callable[[Any], object] = id) -> Any:
    options: Any = {"model": "m", "messages": [user(question)], "tools": [ADD]}
    if stream:
        async with client.chat.completions.stream(**options) as events:
            async for event in events:
                seen(event)
            (choice,) = (await events.get_final_completion()).choices
    else:
        (choice,) = (await client.chat.completions.create(**options)).choices
    message = choice.message
    calls = [[call.id, call.function.name, call.function.arguments] for call in message.tool_calls or ()]
    return [message.content or "", getattr(message, "reasoning_content", ""), calls, choice.finish_reason]


async def responses(client: Any, question: str, stream: bool, seen: Callable[[Any], object] = id) -> Any:
    tool: Any = {"type": "function", "strict": False, **ADD["function"]}
    options: Any = {"model": "m", "input": question, "tools": [tool]}
    if not stream:
        return [item.to_dict() for item in (await client.responses.create(**options)).output]
    items = []
    async with client.responses.stream(**options) as events:
        async for event in events:
            seen(event)
            if event.type == "response.output_item.done":
                items.append(event.item.to_dict())
        final = [item.to_dict() for item in (await events.get_final_response()).output]
    assert [_plain(item) for item in final] == [_plain(item) for item in items]
    return [_plain(item) for item in items]


def _plain(item: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in part.items() if name != "parsed"} for part in item.get("content", ())]
    return {**{name: value for name, value in item.items() if name != "parsed_arguments"}, **({"content": content} if content else {})}


async def messages(client: Any, question: str, stream: bool, seen: Callable[[Any], object] = id) -> Any:
    tool: Any = {"name": "add", "input_schema": SCHEMA}
    options: Any = {"model": "m", "max_tokens": 400, "messages": [user(question)], "tools": [tool]}
    if not stream:
        return [block.to_dict() for block in (await client.messages.create(**options)).content]
    async with client.messages.stream(**options) as events:
        async for event in events:
            seen(event)
        return [block.to_dict() for block in (await events.get_final_message()).content]


def client_of(ask: Any, llm: ModelEndpoint) -> Any:
    return llm.anthropic() if ask is messages else llm.openai()


DIALECTS = pytest.mark.parametrize("ask", [chat, responses, messages], ids=lambda ask: ask.__name__)


@DIALECTS
async def test_a_stream_puts_together_what_a_plain_answer_is(ask: Any) -> None:
    texts = (THINKS, "three", "", "one <b> two\n\n", f"So:\n{CALL[:-30]}", "<think>\nHm.")

    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with client_of(ask, llm) as client:
            for place, text in enumerate(texts):
                stage[0] = text
                plain, streamed = await ask(client, f"{place}?", False), await ask(client, f"{place}?", True)
                told = json.dumps(streamed, sort_keys=True).replace(f"c{2 * place + 1:05}", f"c{2 * place:05}")
                told = told.replace(f"3-0-0-{2 * place + 1}", f"3-0-0-{2 * place}")
                assert told == json.dumps(plain, sort_keys=True), text
        return 1.0

    stage = [""]
    _, trajectories = await play(run, answer=lambda request: says(stage[0])(request))
    assert trajectories[0].error is None


@DIALECTS
async def test_recorded_tokens_are_the_same_with_and_without_streams(ask: Any) -> None:
    recorded = []
    for stream in (False, True):

        async def run(task: Task, llm: ModelEndpoint, stream: bool = stream) -> float:
            async with client_of(ask, llm) as client:
                for question in ("one", "two", "three"):
                    await ask(client, question, stream)
            return 1.0

        engine = ScriptedEngine(answer=says(THINKS, "three", f"So:\n{CALL}"), max_model_len=4096, step_s=STEP_S)
        await engine.start()
        server = EndpointServer()
        (trajectory,) = await Stage(agent(run), engine).play(server)
        await server.close()
        assert trajectory.error is None
        recorded.append([[row.tokens.tolist(), [turn.logprobs.tolist() for turn in row.turns]] for row in merge_turns(trajectory)])
    assert recorded[0] == recorded[1]


@DIALECTS
async def test_tokens_reach_the_client_in_the_step_that_samples_them(ask: Any) -> None:
    engine = SteppedEngine(answer=says("one two three four five six"), max_model_len=4096)
    seen: list[tuple[int, str]] = []

    def note(event: Any) -> None:
        text = getattr(event, "delta", None) if ask is not messages else getattr(event, "text", None)
        if isinstance(text, str) and event.type in ("content.delta", "response.output_text.delta", "text"):
            seen.append((engine.steps, text))

    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with client_of(ask, llm) as client:
            asked = asyncio.create_task(ask(client, "?", True, note))
            while not asked.done():
                await engine.step()
            await asked
        return 1.0

    await engine.start()
    server = EndpointServer()
    (trajectory,) = await Stage(agent(run), engine).play(server)
    await server.close()
    assert trajectory.error is None
    assert "".join(text for _, text in seen) == "one two three four five six"
    assert len({step for step, _ in seen}) > 5
    first = next(step for step, _ in seen)
    begun = engine.steps - len(trajectory.turns[0].token_ids)  # steps in which the request was not there yet
    assert first - begun <= 2


async def test_the_first_byte_of_64_streams_comes_within_two_steps() -> None:
    engine = SteppedEngine(answer=says("one two three four"), max_model_len=4096)
    begun: dict[int, int] = {}  # step of the first bytes, by stream

    async def ask(server: EndpointServer, llm: ModelEndpoint, number: int) -> None:
        bodies = [json.dumps({**BODY, "messages": [user(f"{number}")]}).encode()]

        async def receive() -> dict[str, Any]:
            if not bodies:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": bodies.pop()}

        async def send(message: dict[str, Any]) -> None:
            if message.get("body"):
                begun.setdefault(number, engine.steps)

        headers = [(b"authorization", f"Bearer {llm.api_key}".encode())]
        await server({"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}, receive, send)

    async def run(task: Task, llm: ModelEndpoint) -> float:
        streams = [asyncio.create_task(ask(server, llm, number)) for number in range(64)]
        while len(engine.waiting) < 64:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        while not all(stream.done() for stream in streams):
            await engine.step()
        return 1.0

    await engine.start()
    server = EndpointServer()
    (trajectory,) = await Stage(agent(run), engine).play(server)
    await server.close()
    assert (trajectory.error, len(begun)) == (None, 64)
    assert max(begun.values()) <= 2


@pytest.mark.parametrize("stop", [["two"], [" tw"], ["e two three", "never"], ["\n\n"]])
async def test_nothing_of_a_stop_string_is_sent(stop: list[str]) -> None:
    text = "one two\n\nthree one"

    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            stream = await client.chat.completions.create(model="m", messages=[user("?")], stop=stop, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        cut = min([text.find(one) for one in stop if one in text] or [len(text)])
        assert "".join(pieces) == text[:cut]
        return 1.0

    def answer(request: GenerationRequest) -> list[int]:
        ids = CODEC.encode_text(text)
        ends = [end for end in range(1, len(ids)) if any(one in CODEC.decode(ids[:end]) for one in stop)]
        return ids[: ends[0]] if ends else [*ids, *CODEC.turn_end_ids]

    engine = ScriptedEngine(answer=answer, max_model_len=4096, step_s=STEP_S)
    await engine.start()
    server = EndpointServer()
    (trajectory,) = await Stage(agent(run), engine).play(server)
    await server.close()
    assert trajectory.error is None


async def leaves_in_the_middle(llm: ModelEndpoint) -> str:
    """Read the beginning of a stream, and close the connection."""
    async with caller(llm) as client, client.stream("POST", "chat/completions", json=BODY) as answer:
        text = ""
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            if len(text) > 10:
                break
    return text


async def test_a_client_that_closes_in_the_middle_cancels_its_turn() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        seen.append(await leaves_in_the_middle(llm))
        while not stage.episodes[0].session.exchanges[0].task.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        async with llm.openai() as client:
            await client.chat.completions.create(model="m", messages=[user("two")])
        return 1.0

    seen: list[str] = []
    server = EndpointServer()
    engine = ScriptedEngine(answer=says("one two three " * 60), max_model_len=4096, step_s=0.02)
    stage = Stage(agent(run), engine, settings=SETTINGS)
    await engine.start()
    (trajectory,) = await stage.play(server)
    await server.close()
    assert trajectory.error is None
    left, whole = trajectory.turns
    assert (left.finish_reason, left.masked) == (FinishReason.ABORTED, "cancelled")
    text = CODEC.decode(left.token_ids.tolist())
    assert text.startswith(seen[0])
    assert 10 < len(text) < len("one two three " * 60)
    assert [len(row.turns) for row in merge_turns(trajectory)] == [1]
    assert (left.branch_reason, whole.branch_reason) == ("", "forked")
    assert trajectory.metrics["endpoint/abandoned"] == 1


async def test_a_retry_of_a_torn_stream_gets_the_same_answer_from_its_beginning() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        begun = await leaves_in_the_middle(llm)
        async with caller(llm) as client:
            lines = (await client.post("chat/completions", json=BODY)).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        whole = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        assert whole.startswith(begun)
        assert (whole, lines[-2]) == ("one two three " * 3, "data: [DONE]")
        return 1.0

    engine = ScriptedEngine(answer=says("one two three " * 3), max_model_len=4096, step_s=0.01)
    await engine.start()
    server = EndpointServer()
    (trajectory,) = await Stage(agent(run), engine).play(server)
    await server.close()
    assert (trajectory.error, len(trajectory.turns), trajectory.turns[0].masked) == (None, 1, "")
    assert trajectory.metrics["endpoint/retries"] == 1


@DIALECTS
async def test_an_engine_that_fails_in_the_middle_ends_the_stream_with_an_error(ask: Any) -> None:
    class Fails(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> Generation:
            if request.on_tokens is not None:
                request.on_tokens(CODEC.encode_text("one two"))
                await asyncio.sleep(0.1)
                raise EngineError("gone")
            return await super().generate(request)

    seen: list[Any] = []

    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with client_of(ask, llm) as client:
            with pytest.raises(Exception, match=r"gone|completed"):
                await ask(client, "?", True, seen.append)
            await ask(client, "?", False)
        return 1.0

    engine = Fails(answer=says("three"), max_model_len=4096)
    await engine.start()
    server = EndpointServer()
    (trajectory,) = await Stage(agent(run), engine).play(server)
    await server.close()
    assert seen
    assert trajectory.metrics["endpoint/refused"] == 1
    assert len(trajectory.turns) == 1


async def test_a_stream_without_tokens_for_long_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "PING_S", 0.05)

    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with caller(llm) as client:
            text = (await client.post("chat/completions", json=BODY)).text
        assert text.startswith(": the model is writing\n\n")
        assert text.endswith("data: [DONE]\n\n")
        return 1.0

    _, trajectory = await play_one(run, "three", delay=lambda request: 0.3)
    assert trajectory.error is None


async def test_calls_of_custom_tools_and_of_one_call_at_most() -> None:
    shell = CALL.replace("add", "shell").replace('{"a": 1, "b": 2}', '{"input": "ls -l"}')

    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            tools: Any = [{"type": "custom", "name": "shell"}, {"type": "function", "strict": False, **ADD["function"]}]
            async with client.responses.stream(model="m", input="?", tools=tools) as events:
                inputs = [event.delta async for event in events if event.type == "response.custom_tool_call_input.delta"]
                first, second = (await events.get_final_response()).output
            assert (inputs, first.input, second.arguments) == (["ls -l"], "ls -l", '{"a": 1, "b": 2}')
            stream = client.chat.completions.stream(model="m", messages=[user("?")], tools=[ADD], parallel_tool_calls=False)
            async with stream as events:
                assert len((await events.get_final_completion()).choices[0].message.tool_calls) == 1
        return 1.0

    engine = ScriptedEngine(answer=says(f"{shell}\n{CALL}"), max_model_len=4096, step_s=STEP_S)
    await engine.start()
    server = EndpointServer()
    (trajectory,) = await Stage(agent(run), engine).play(server)
    await server.close()
    assert trajectory.error is None


async def test_arguments_of_a_call_whose_form_is_held_come_as_they_are_sampled() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            stream = await client.chat.completions.create(model="m", messages=[user("?")], tools=[ADD], tool_choice="required", stream=True)
            calls = [call.function async for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
            assert calls[0].name == "add"
            assert len(calls) > 4
            assert "".join(call.arguments for call in calls) == '{"a": 1, "b": 2}'
            await client.chat.completions.create(model="m", messages=[user("one")])
        return 1.0

    engine = ScriptedEngine(answer=says(CALL, "three"), max_model_len=4096, step_s=STEP_S)
    await engine.start()
    server = EndpointServer()
    (trajectory,) = await Stage(agent(run), engine).play(server)
    await server.close()
    assert (trajectory.error, trajectory.turns[0].masked) == (None, "constrained")


def test_what_tells_tokens_is_no_part_of_a_request() -> None:
    request = GenerationRequest(request_id="a", prompt_ids=np.zeros(1, dtype=np.int32), sampling=None)  # type: ignore[arg-type]
    assert "on_tokens" not in repr(request)
