"""``agentrl serve``: one line with address and key, real clients, a clean end."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from agentrl.api import serving
from agentrl.api.serving import NO_MODEL, serve, summary
from agentrl.cli.main import main
from agentrl.config.evaluate import ServeConfig
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError
from agentrl.resolve.parts import cluster_plan
from agentrl.rollout.endpoint.answers import Parts, Settled
from agentrl.rollout.plan import EndpointConfig

READY = re.compile(r"serving (\S+) at (http://127\.0\.0\.1:\d+) key (\S+)")
QUESTION = [{"role": "user", "content": "Who is there?"}]


class Screen:
    """Lines that a person would see."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.ready = asyncio.Event()

    def __call__(self, line: str, *, is_result: bool = False) -> None:
        self.lines.append(line)
        if is_result:
            self.ready.set()


@asynccontextmanager
async def served(screen: Screen, port: int = 0, config: ServeConfig | None = None) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a server that is cancelled at the end."""
    plan = cluster_plan(changed(config or ServeConfig(), endpoint_port=port, engine="none"))
    task = asyncio.create_task(serve(plan, "tiny", screen))
    ready = asyncio.create_task(screen.ready.wait())
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    if task.done():
        await task
    found = READY.fullmatch(screen.lines[-1])
    assert found, screen.lines
    assert found[1] == "tiny"
    client = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
    async with openai.AsyncOpenAI(base_url=f"{found[2]}/v1", api_key=found[3], max_retries=0, http_client=client) as asks:
        yield asks
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.anyio
async def test_requests_are_answered_and_the_end_says_what_happened() -> None:
    screen = Screen()
    async with served(screen) as client:
        answer = await client.chat.completions.create(model="any", messages=QUESTION)
        assert answer.choices[0].message.content == NO_MODEL
        other = [{"role": "user", "content": "And now?"}]
        streamed = await client.chat.completions.create(model="any", messages=other, stream=True)
        assert "".join([event.choices[0].delta.content or "" async for event in streamed]) == NO_MODEL
        with pytest.raises(openai.BadRequestError, match="logprobs"):
            await client.chat.completions.create(model="any", messages=QUESTION, logprobs=True)
        form = {"type": "json_object"}
        with pytest.raises(openai.BadRequestError, match=r"response_format: cannot be honoured: .* this engine cannot constrain"):
            await client.chat.completions.create(model="any", messages=QUESTION, response_format=form)
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-wrong").models.list()
    refused, unconstrained, ended = screen.lines[1:]
    assert unconstrained.startswith("refused with 400: response_format: cannot be honoured")
    assert refused.startswith("refused with 400: logprobs = true: cannot be honoured")
    assert ended == "4 requests, 2 branches (sub-agent 1), 2 refused, 0 abandoned"


class ShoutedCalls:
    """A parser of a form that only the test knows: every answer calls the function ``shout``."""

    marks = None

    def __init__(self, config: EndpointConfig) -> None:
        self.config = config

    def parse(self, sampled: str, tools: Sequence[Any], *, reasons: bool = True) -> Parts:
        return Parts(text="", calls=(("shout", json.dumps({"text": sampled})),)) if tools else Parts(text=sampled)

    def settled(self, rest: str, tools: Sequence[Any], *, begins: bool, is_held: bool = False) -> Settled:
        return Settled()

    def structure(self, schema: Any, tools: Sequence[Any]) -> None:
        return None


@pytest.mark.anyio
async def test_answers_go_through_the_parser_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[ShoutedCalls]()

    def make(config: EndpointConfig, tokenizer: Any) -> ShoutedCalls:
        made.append(ShoutedCalls(config))
        return made[-1]

    monkeypatch.setattr(serving, "answer_parser", make)
    config = ServeConfig(endpoint=EndpointConfig(tool_parser="shouted", reasoning_parser="none"))
    shout = {"type": "function", "function": {"name": "shout"}}
    async with served(Screen(), config=config) as client:
        answer = await client.chat.completions.create(model="any", messages=QUESTION, tools=[shout])
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("shout", {"text": NO_MODEL})
    assert [(parser.config.tool_parser, parser.config.reasoning_parser) for parser in made] == [("shouted", "none")]


@pytest.mark.slow
def test_an_unknown_parser_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "tiny", "--engine", "none", "--tool-parser", "hermess"]) == 2
    assert "--tool-parser = 'hermess': is no parser of vLLM" in capsys.readouterr().err


@pytest.mark.anyio
async def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--endpoint-port = {port}: cannot be used"):
            async with served(Screen(), port):
                pass
    screen = Screen()
    async with served(screen, port):
        assert f"127.0.0.1:{port}" in screen.lines[0]


def test_a_wrong_port_and_a_missing_model_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "tiny", "--port", "70000"]) == 2
    assert "--endpoint-port = 70000: must be less than or equal to 65535" in capsys.readouterr().err
    assert main(["serve", "/no/such/model"]) == 2
    assert "/no/such/model" in capsys.readouterr().err


def test_the_summary_names_reasons() -> None:
    metrics = {"endpoint/requests": 3.0, "endpoint/branches": 1.0, "endpoint/refused": 0.0, "endpoint/abandoned": 0.0}
    assert summary(metrics) == "3 requests, 1 branch, 0 refused, 0 abandoned"


@pytest.mark.slow
def test_ctrl_c_ends_the_command() -> None:
    words = [sys.executable, "-m", "agentrl", "serve", "tiny", "--engine", "none"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert READY.fullmatch(process.stdout.readline().rstrip("\n"))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0
    assert errors.endswith("agentrl: 0 requests, 0 branches, 0 refused, 0 abandoned\n")
    assert "Traceback" not in errors
