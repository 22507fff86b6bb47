"""Episodes on a real server with NeMo Gym's routes, cookies and bodies."""

import asyncio
import gzip
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.core.errors import DataError, EnvLoadError
from agentrl.core.types import Task
from agentrl.env.prompts import PromptFormat, read_prompts
from agentrl.env.responses import PARAMS, Transcript, chat_of
from agentrl.env.tools.calls import parse_tool_calls
from agentrl.suites.nemo_gym import NemoGymEnv, load_nemo_gym
from tests import env_servers
from tests.servers import Handler, Request, serve
from tests.unit.suites.remote import call, metric, outcome, play, said, script

pytestmark = pytest.mark.anyio

COUNT = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"], "additionalProperties": False}
NAMES = ("get_counter_value", "breaks", "hangs", "forgets", "missing", "verify")
TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, "strict": True} for name in NAMES]
TOOLS.append({"type": "function", "name": "increment_counter", "description": "Count on.", "parameters": COUNT, "strict": True})
ADD = script(call("increment_counter", count=1), call("increment_counter", count=2), call("get_counter_value"), "It is 6.")


def row(**extra: Any) -> dict[str, Any]:
    params = {"input": [{"role": "user", "content": "Add 1, then 2."}], "tools": TOOLS}
    return {PARAMS: params, "initial_count": 3, "expected_count": 6, **extra}


def task(**extra: Any) -> Task:
    given = row(**extra)
    return Task(chat_of(given[PARAMS]), metadata=given, id="count")


@pytest.fixture(scope="module")
def counter() -> Iterator[str]:
    with env_servers.module("nemo_like") as server:
        yield f"http://127.0.0.1:{server.port}"


def state(url: str) -> Any:
    return httpx.get(f"{url}/_state").json()


@pytest.mark.parametrize("path", ["/mcp", "/mcp-stream"])
async def test_tools_of_an_mcp_server_are_listed_and_called(counter: str, path: str) -> None:
    given = {**row(mcp_path=path), PARAMS: {"input": "Add 1, then 2."}}
    rows = [Task(chat_of(given[PARAMS]), metadata=given, id=str(number)) for number in range(4)]
    adds = script(call("count_on", count="one"), call("count_on", count=1), call("count_on", count=2), call("count_now"), "It is 6.")
    for trajectory in await asyncio.gather(*(play(load_nemo_gym(f"nemo-gym:{counter}"), task, adds) for task in rows)):
        assert outcome(trajectory) == ("finished", 1.0)
        text = said(trajectory)
        assert '"name": "count_on", "description": "Count on.", "parameters": {"type": "object"' in text
        assert '"name": "count_now"' in text
        assert "Error: count must be an integer" in text
        assert "<|im_start|>tool\ncount 6<|im_end|>" in text


async def test_an_episode_of_several_steps(counter: str) -> None:
    trajectory = await play(load_nemo_gym(f"nemo-gym:{counter}"), task(), ADD)
    assert outcome(trajectory) == ("finished", 1.0)
    text = said(trajectory)
    assert '"name": "increment_counter", "description": "Count on."' in text
    assert "<|im_start|>tool\n" + '{"count":6}<|im_end|>' in text
    assert metric(trajectory, "num_calls") == 3
    assert metric(trajectory, "tool_calls") == 1
    seen = state(counter)
    assert seen["calls"][-6:] == [
        "/seed_session",
        "/increment_counter",
        "/increment_counter",
        "/get_counter_value",
        "/verify",
        "/close_session",
    ]
    assert seen["counters"] == {}


async def test_64_episodes_at_a_time_keep_their_sessions(counter: str) -> None:
    cls = load_nemo_gym(f"nemo-gym:{counter}")
    held: list[dict[str, int]] = []

    def player(number: int) -> Any:
        def write(turn: int, text: str) -> str:
            if turn < 3:
                return call("increment_counter", count=number * 10 + turn)
            if number == 0:
                held.append(state(counter)["counters"])
            return "Done." if turn > 3 else call("get_counter_value")

        return write

    sums = [3 + 30 * number + 3 for number in range(64)]
    before = len(state(counter)["closed"])
    played = [play(cls, task(expected_count=total), player(number), number) for number, total in enumerate(sums)]
    trajectories = await asyncio.gather(*played)
    assert [outcome(trajectory) for trajectory in trajectories] == [("finished", 1.0)] * 64
    assert all(f'{{"count":{total}}}' in said(trajectory) for total, trajectory in zip(sums, trajectories, strict=True))
    assert any(len(counters) > 32 for counters in held)
    seen = state(counter)
    assert (len(seen["closed"]) - before, len(set(seen["closed"])), seen["counters"]) == (64, len(seen["closed"]), {})


async def test_a_wrong_count_earns_nothing(counter: str) -> None:
    trajectory = await play(load_nemo_gym(f"nemo-gym:{counter}"), task(), script(call("increment_counter", count=2), "Done."))
    assert outcome(trajectory) == ("finished", 0.0)


async def test_wrong_calls_are_told_to_the_model(counter: str) -> None:
    wrong = script(
        call("increment_counter", count="many"),
        call("missing"),
        call("no such tool"),
        call("verify", reward=1),
        call("../_state"),
        '<tool_call>{"name": "increment_counter", "arguments": [1, 2]}</tool_call><tool_call>{oops</tool_call>',
        '<tool_call>{"name": "increment_counter", "arguments": {"count": NaN}}</tool_call>',
        '{"tool": "increment_counter", "args": [3]}',
        "Done.",
    )
    trajectory = await play(load_nemo_gym(f"nemo-gym:{counter}?max_steps=12"), task(), wrong)
    assert outcome(trajectory) == ("finished", 1.0)
    text = said(trajectory)
    for expected in (
        "Error: 422: {",
        "Error: 404: {",
        "there is no tool 'no such tool'",
        "there is no tool 'verify'",
        "there is no tool '../_state'",
        "increment_counter takes fewer arguments",
        "the call is not valid JSON",
        "cannot be sent",
    ):
        assert expected in text, expected
    assert metric(trajectory, "bad_calls") == pytest.approx(8 / 8)
    assert state(counter)["calls"].count("/verify") == sum(path == "/seed_session" for path in state(counter)["calls"])


async def test_only_so_many_calls_in_one_turn(counter: str) -> None:
    both = call("increment_counter", count=1) + call("increment_counter", count=2)
    trajectory = await play(load_nemo_gym(f"nemo-gym:{counter}?max_calls=1"), task(expected_count=4), script(both, "Done."))
    assert outcome(trajectory) == ("finished", 1.0)
    assert "only 1 calls are run in one turn" in said(trajectory)


@pytest.mark.parametrize(("option", "max_turns"), [("?max_steps=2", 9), ("", 2)])
async def test_the_last_step_is_verified_as_it_stands(counter: str, option: str, max_turns: int) -> None:
    trajectory = await play(load_nemo_gym(f"nemo-gym:{counter}{option}"), task(), ADD, max_turns=max_turns)
    assert outcome(trajectory) == ("truncated", 1.0)
    assert len(trajectory.turns) == 2


async def test_an_answer_that_was_cut_off_is_verified(counter: str) -> None:
    endless = script(call("increment_counter", count=1) * 20)
    trajectory = await play(load_nemo_gym(f"nemo-gym:{counter}"), task(expected_count=3), endless, max_new_tokens=50)
    assert outcome(trajectory) == ("truncated", 1.0)


async def test_a_tool_that_breaks(counter: str) -> None:
    steps = script(call("breaks"), call("increment_counter", count=3), "Done.")
    before = state(counter)["calls"].count("/breaks")
    failed = await play(load_nemo_gym(f"nemo-gym:{counter}"), task(), steps)
    assert outcome(failed) == ("env_error", None)
    assert '/breaks: answered 500: {"detail":"the tool broke"}' in str(failed.error)
    told = await play(load_nemo_gym(f"nemo-gym:{counter}?on_tool_failure=tell"), task(), steps)
    assert outcome(told) == ("finished", 1.0)
    assert 'Error: 500: {"detail":"the tool broke"}' in said(told)
    assert state(counter)["calls"].count("/breaks") - before == 2


async def test_a_session_that_is_lost_is_noticed(counter: str) -> None:
    trajectory = await play(load_nemo_gym(f"nemo-gym:{counter}"), task(), script(call("forgets"), "Done."))
    assert outcome(trajectory) == ("env_error", None)
    assert "answered for another session" in str(trajectory.error)


async def test_a_tool_that_hangs_ends_in_time(counter: str) -> None:
    start = time.monotonic()
    trajectory = await play(load_nemo_gym(f"nemo-gym:{counter}?timeout_s=1"), task(), script(call("hangs"), "Done."))
    assert outcome(trajectory) == ("env_error", None)
    assert "within 1 s" in str(trajectory.error)
    assert time.monotonic() - start < 10


async def test_a_row_that_the_server_refuses_is_not_sent_again(counter: str) -> None:
    before = len(state(counter)["calls"])
    given = {key: value for key, value in row().items() if key != "initial_count"}
    trajectory = await play(load_nemo_gym(f"nemo-gym:{counter}"), Task("x", metadata=given, id="x"), ADD)
    assert outcome(trajectory) == ("env_error", None)
    assert "initial_count" in str(trajectory.error)
    assert len(state(counter)["calls"]) == before


async def test_a_masked_sample_is_a_failure(counter: str) -> None:
    trajectory = await play(load_nemo_gym(f"nemo-gym:{counter}"), task(mask=True), ADD)
    assert outcome(trajectory) == ("env_error", None)
    assert "mask_sample" in str(trajectory.error)


async def test_a_task_that_is_no_row(counter: str) -> None:
    trajectory = await play(load_nemo_gym(f"nemo-gym:{counter}"), Task("Add.", id="plain"), ADD)
    assert outcome(trajectory) == ("env_error", None)
    assert "has no responses_create_params" in str(trajectory.error)


async def test_a_server_killed_in_the_middle() -> None:
    with env_servers.module("nemo_like") as server:

        def write(turn: int, text: str) -> str:
            if turn == 1:
                server.kill()
            return call("increment_counter", count=1)

        trajectory = await play(load_nemo_gym(f"nemo-gym:http://127.0.0.1:{server.port}"), task(), write)
    assert outcome(trajectory) == ("env_error", None)
    assert "/increment_counter: ConnectError" in str(trajectory.error)
    again = await play(load_nemo_gym(f"nemo-gym:http://127.0.0.1:{server.port}"), task(), ADD)
    assert outcome(again) == ("env_error", None)


COOKIE = {"Set_Cookie": "s=1; Path=/"}


def after_seed(handler: Handler, path: str = "/increment_counter") -> Handler:
    """Honest, except on one route."""

    async def handle(request: Request) -> None:
        await (handler(request) if request.path == path else request.answer({"reward": 1.0}, **COOKIE))

    return handle


async def drip(request: Request) -> None:
    await request.send(b"HTTP/1.1 200 X\r\nContent-Length: 100000\r\n\r\n")
    while True:
        await request.send(b" ")
        await asyncio.sleep(0.05)


async def redirect(request: Request) -> None:
    await request.answer({}, status=307, Location="http://127.0.0.1:1/secret")


def body(content: bytes, **headers: str) -> Handler:
    async def handler(request: Request) -> None:
        await request.answer(body=content, **headers)

    return handler


HOSTILE = {
    "drip": (after_seed(drip), "no usable answer within 1 s|no answer within 1 s|was not done within 1 s"),
    "bomb": (after_seed(body(gzip.compress(bytes(200_000_000), 9), Content_Encoding="gzip")), "larger than"),
    "huge": (after_seed(body(b"[" + b"0," * 3_000_000 + b"0]"), "/verify"), "larger than"),
    "redirect": (after_seed(redirect), "redirects are not followed"),
    "NaN": (after_seed(body(b'{"reward": NaN}'), "/verify"), "NaN is no number"),
    "no reward": (after_seed(body(b"{}"), "/verify"), "reward = None"),
    "text": (after_seed(body(b'{"reward": "1"}'), "/verify"), "must be a number"),
    "no object": (after_seed(body(b"[1]"), "/verify"), "no object with a reward"),
    "no cookie": (body(b"{}"), "set no session cookie"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_answers(name: str) -> None:
    handler, expected = HOSTILE[name]
    async with serve(handler) as server:
        start = time.monotonic()
        cls = load_nemo_gym(f"nemo-gym:{server.url}?timeout_s={1 if name == 'drip' else 15}")
        trajectory = await play(cls, task(), script(call("increment_counter", count=1), "Done."))
        assert outcome(trajectory) == ("env_error", None)
        assert re.search(expected, str(trajectory.error)), trajectory.error
        assert time.monotonic() - start < 10
        paths = [request.path for request in server.requests]
        assert len(paths) == len(set(paths))
        assert ("/close_session" in paths) == (name != "no cookie")


async def test_an_overloaded_server_is_waited_for() -> None:
    refused: list[str] = []

    async def busy(request: Request) -> None:
        if request.path not in refused:
            refused.append(request.path)
            await request.answer({}, status=503)
        else:
            await request.answer({"reward": 1.0}, **COOKIE)

    async with serve(busy) as server:
        trajectory = await play(load_nemo_gym(f"nemo-gym:{server.url}"), task(), script(call("increment_counter", count=1), "Done."))
    assert outcome(trajectory) == ("finished", 1.0)
    assert refused[:3] == ["/seed_session", "/increment_counter", "/verify"]


async def test_parts_of_the_reward() -> None:
    answer = {"reward": 0.75, "reward_components": {"right": 0.5, "short": 0.25}, "initial_count": 7, "steps": 2, "note": "x"}
    async with serve(after_seed(body(json.dumps(answer).encode()), "/verify")) as server:
        trajectory = await play(load_nemo_gym(f"nemo-gym:{server.url}"), task(), script("Done."))
    assert outcome(trajectory) == ("finished", 0.75)
    assert dict(trajectory.reward_parts) == {"right": 0.5, "short": 0.25}
    assert dict(trajectory.metrics) == {"steps": 2.0}


def test_turns_as_items() -> None:
    transcript = Transcript()
    text = '<think>Add one.</think>I add.<tool_call>{"name": "a", "arguments": {"n": 1}}</tool_call>'
    (call_id,) = transcript.add_turn(text, parse_tool_calls(text), is_complete=True)
    transcript.add_output(call_id, "2")
    transcript.add_turn("It is 2.", [], is_complete=True)
    kinds = [(item["type"], item.get("name") or item.get("output") or item.get("content") or item["summary"]) for item in transcript.items]
    assert kinds == [
        ("reasoning", [{"type": "summary_text", "text": "Add one."}]),
        ("message", [{"type": "output_text", "text": "I add.", "annotations": []}]),
        ("function_call", "a"),
        ("function_call_output", "2"),
        ("message", [{"type": "output_text", "text": "It is 2.", "annotations": []}]),
    ]
    assert json.loads(transcript.items[2]["arguments"]) == {"n": 1}
    assert transcript.items[2]["call_id"] == transcript.items[3]["call_id"]


def test_rows_as_tasks(tmp_path: Path) -> None:
    history = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Count."}], "type": "message"},
        {"type": "function_call", "name": "a", "arguments": "{}", "call_id": "1"},
        {"type": "function_call_output", "call_id": "1", "output": "2"},
        {"type": "reasoning", "id": "r", "summary": []},
    ]
    rows = [{PARAMS: {"input": "Hi", "instructions": "Speak."}, "label": 7}, {PARAMS: {"input": history}, "expected_count": 2}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    one, two = read_prompts([str(file)], PromptFormat())[0].tasks
    assert one.prompt == [{"role": "system", "content": "Speak."}, {"role": "user", "content": "Hi"}]
    assert (one.label, one.metadata) == (7, rows[0])
    assert [message["role"] for message in two.prompt] == ["system", "user", "assistant", "tool"]
    assert two.prompt[2]["content"] == '<tool_call>{"name": "a", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    "given", [None, {"input": []}, {"input": [{"type": "computer_call"}]}, {"input": [{"role": "user", "content": 7}]}]
)
def test_rows_that_are_no_chat(tmp_path: Path, given: Any) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({PARAMS: given}))
    with pytest.raises(DataError, match="line 1: responses_create_params"):
        read_prompts([str(file)], PromptFormat())


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("nemo-gym:", "is not the address"),
        ("nemo-gym:ftp://host", "is not the address"),
        ("nemo-gym:http://host?max_stepz=1", "no option 'max_stepz'"),
        ("nemo-gym:http://host?max_steps=0", "out of range"),
        ("nemo-gym:http://host?on_tool_failure=x", "out of range"),
    ],
)
def test_specifications_that_cannot_be_used(spec: str, expected: str) -> None:
    with pytest.raises(EnvLoadError, match=expected):
        load_nemo_gym(spec)


async def test_a_class_of_ones_own(counter: str) -> None:
    class Mine(NemoGymEnv):
        url = counter

        tool_prompt = "Write ADD."

        def parse_calls(self, text: str) -> Any:
            return parse_tool_calls(call("increment_counter", count=3)) if "ADD" in text else []

    trajectory = await play(Mine, task(), script("ADD", "Done."))
    assert outcome(trajectory) == ("finished", 1.0)
    assert "Write ADD." in said(trajectory)
    assert '"name": "increment_counter"' not in said(trajectory)


@pytest.mark.parametrize("path", ["//elsewhere/mcp", "http://elsewhere/mcp"])
async def test_an_mcp_server_elsewhere_is_not_asked(counter: str, path: str) -> None:
    trajectory = await play(load_nemo_gym(f"nemo-gym:{counter}"), task(mcp_path=path), ADD)
    assert (trajectory.status, trajectory.reward) == ("env_error", None)
    assert "names no path and headers" in (trajectory.error or "")
