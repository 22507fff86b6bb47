"""Values of wrong types anywhere in a request: an answer or a refusal in the form of the service, never a failure of the endpoint."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from agentrl import ModelEndpoint, Task
from agentrl.config.sections import changed as with_settings
from agentrl.rollout.endpoint import server as endpoint_server
from agentrl.rollout.endpoint.server import EndpointServer
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.endpoint.support import ADD, Stage, agent, caller, play_one, says, user

pytestmark = pytest.mark.anyio

SCHEMA = ADD["function"]["parameters"]
CALLED = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be quick."},
            {"role": "user", "content": [{"type": "text", "text": "one"}], "name": "me"},
            {"role": "assistant", "content": "two", "tool_calls": [CALLED], "reasoning_content": "Hm."},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
        ],
        "tools": [ADD],
        "tool_choice": "auto",
        "stream": False,
        "stream_options": {"include_usage": True},
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stop": ["x"],
        "response_format": {"type": "text"},
        "chat_template_kwargs": {"mood": "good"},
        "parallel_tool_calls": True,
    },
    "/v1/responses": {
        "model": "m",
        "instructions": "Be quick.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}], "content": []},
            {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "two"}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "namespace": "sums"},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "note", "input": "text"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
        ],
        "tools": [
            {"type": "namespace", "name": "sums", "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}]},
            {"type": "custom", "name": "note", "description": "Takes notes."},
        ],
        "tool_choice": "auto",
        "max_output_tokens": 5,
        "text": {"format": {"type": "text"}},
        "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Be quick.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "image", "source": {"type": "url", "url": "x"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "two"},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "3"}]}]},
        ],
        "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "thread": {"type": "create"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "output_config": {"format": None},
        "stop_sequences": ["x"],
    },
}
WRONG: tuple[Any, ...] = (None, True, 7, -1.5, "?", "", [], ["x"], [[]], [None], {}, {"x": 1}, {"type": []}, [{"type": {}}], 10**40)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside a value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(value[key], (*path, key))


def changed(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(body)
    inner: Any = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return made


async def post(server: EndpointServer, llm: ModelEndpoint, path: str, content: bytes) -> tuple[int, Any]:
    """One request without a socket."""
    bodies, sent = [content], list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        if bodies:
            return {"type": "http.request", "body": bodies.pop()}
        await asyncio.Event().wait()
        return {}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {llm.api_key}".encode()), (b"content-length", str(len(content)).encode())]
    await server({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send)
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], json.loads(body) if body.startswith(b"{") else body


def is_error(path: str, answer: Any) -> bool:
    """Return True if an answer is an error in the form of the service."""
    error = answer.get("error")
    if path.endswith("messages"):
        return answer.get("type") == "error" and {"type", "message"} <= error.keys()
    return error.keys() == {"message", "type", "param", "code"}


async def played(path: str, contents: Iterator[bytes]) -> list[tuple[int, bytes, Any]]:
    """Send bodies in one episode; returns the refusals of other statuses than 400, and those in another form."""
    odd: list[tuple[int, bytes, Any]] = []

    async def run(task: Task, llm: ModelEndpoint) -> float:
        for content in contents:
            status, answer = await post(server, llm, path, content)
            if status != 200 and not (status in (400, 404, 413) and is_error(path, answer)):
                odd.append((status, content[:300], answer))
        assert (await post(server, llm, path, json.dumps(BODIES[path]).encode()))[0] == 200
        return 1.0

    server = EndpointServer()
    stage = Stage(agent(run), ScriptedEngine(answer=says("three"), max_model_len=4096))
    stage.settings = with_settings(stage.settings, max_requests=100_000, episode_timeout_s=300.0)
    await stage.engine.start()
    (trajectory,) = await stage.play(server)
    await server.close()
    assert trajectory.error is None
    return odd


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_a_wrong_type_anywhere_is_no_failure_of_the_endpoint(path: str) -> None:
    body = BODIES[path]
    assert await played(path, (json.dumps(changed(body, place, value)).encode() for place in places(body) for value in WRONG)) == []


def nested(depth: int, inner: str = "{}") -> str:
    return '{"properties":' * depth + inner + "}" * depth


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_what_is_nested_deeply_is_refused(path: str) -> None:
    def bodies() -> Iterator[bytes]:
        tools = json.dumps(BODIES[path]["tools"])
        known = json.dumps(SCHEMA)
        assert known in tools
        whole = json.dumps(BODIES[path])
        for depth in (100, 300, 450, 900, 5000, 100_000):
            yield whole.replace(known, nested(depth)).encode()
        many = json.dumps([json.loads(tools)[0]] * 2000).replace(known, nested(900))
        yield whole.replace(tools, many).encode()

    assert await played(path, bodies()) == []


async def test_a_fault_of_the_endpoint_is_told_in_the_form_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with caller(llm) as client:
            monkeypatch.setattr(endpoint_server.EndpointSession, "begin", broken)
            for path in BODIES:
                answer = await client.post(path.removeprefix("/v1/"), json=BODIES[path])
                assert (answer.status_code, is_error(path, answer.json())) == (500, True)
                assert "ZeroDivisionError" in answer.text
            monkeypatch.undo()
            assert (await client.post("chat/completions", json={"model": "m", "messages": [user("one")]})).status_code == 200
        return 1.0

    def broken(*arguments: Any) -> Any:
        raise ZeroDivisionError

    _, trajectory = await play_one(run, "three")
    assert trajectory.error is None
