"""Episodes over WebSockets on the real OpenEnv server, and against servers that lie."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_sockets

from agentrl import OpenEnvEnv
from agentrl.core.errors import EnvLoadError
from agentrl.core.types import Task
from agentrl.suites.load import load_agent
from agentrl.suites.openenv import load_openenv
from tests import env_servers
from tests.servers import Request, serve
from tests.unit.suites.remote import metric, outcome, play, said, script

pytestmark = pytest.mark.anyio

SESSIONS = 40
FIVE = Task("guess", id="g", seed=3, metadata={"numbered": True})  # random.Random(3).randint(1, 9) is 4


@pytest.fixture(scope="module")
def guess() -> Iterator[str]:
    with env_servers.module("open_env", str(SESSIONS)) as server:
        yield f"127.0.0.1:{server.port}"


def bisect(turn: int, text: str) -> str:
    """Halves what is left after the hints so far."""
    low, high = 1, 9
    for number, hint in re.findall(r"assistant\n(\d+).*?(Higher|Lower)", text, re.DOTALL):
        low, high = (int(number) + 1, high) if hint == "Higher" else (low, int(number) - 1)
    return str((low + high) // 2)


def open_environments(address: str) -> int:
    return int(httpx.get(f"http://{address}/_open").json())


async def test_an_episode(guess: str) -> None:
    trajectory = await play(load_openenv(f"openenv:ws://{guess}"), FIVE, bisect)
    assert outcome(trajectory) == ("finished", 1.0)
    text = said(trajectory)
    assert "user\ntext: A number from 1 to 9.\nguesses: 0<|im_end|>" in text
    assert [turn.text for turn in trajectory.turns] == ["5<|im_end|>", "2<|im_end|>", "3<|im_end|>", "4<|im_end|>"]
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 0.0, 1.0]


async def test_many_episodes_at_a_time(guess: str) -> None:
    cls = load_openenv(f"openenv:ws://{guess}")
    tasks = [Task("guess", id=str(n), seed=n, metadata={"numbered": True}) for n in range(SESSIONS)]
    trajectories = await asyncio.gather(*(play(cls, task, bisect, n) for n, task in enumerate(tasks)))
    assert [outcome(trajectory) for trajectory in trajectories] == [("finished", 1.0)] * SESSIONS
    again = await play(cls, tasks[7], bisect)
    assert said(again) == said(trajectories[7])
    assert len({said(trajectory) for trajectory in trajectories}) > 5
    await asyncio.sleep(0.3)
    assert open_environments(guess) == 0


async def test_the_end_by_the_environments_own_limit_is_truncation(guess: str) -> None:
    trajectory = await play(load_openenv(f"openenv:ws://{guess}"), FIVE, script(*["9"] * 5))
    assert outcome(trajectory) == ("truncated", 0.0)
    assert metric(trajectory, "guesses") == 5


async def test_answers_that_are_no_action(guess: str) -> None:
    cls = load_openenv(f"openenv:ws://{guess}")
    wrong = script("I think", '{"number": "x"}', "maybe 3", '{"digit": 3}', "4")
    trajectory = await play(cls, FIVE, wrong)
    assert outcome(trajectory) == ("finished", 1.0)
    assert "Write a number (number)." in said(trajectory)
    assert "number: Input should be a valid integer" in said(trajectory)
    assert "digit: Extra inputs are not permitted" in said(trajectory)
    assert metric(trajectory, "invalid_action") == pytest.approx(3 / 5)
    hopeless = await play(load_openenv(f"openenv:ws://{guess}?max_invalid=1&invalid_reward=-0.5"), FIVE, script("a", "b", "c"))
    assert (outcome(hopeless), len(hopeless.turns), hopeless.score) == (("finished", -1.0), 2, 0.0)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (100, "EXECUTION_ERROR: the environment broke"),
        (101, "no answer within 1.5 s"),
        (102, "larger than 1048576 bytes"),
        (103, "no step of it"),
    ],
)
async def test_an_environment_that_fails(guess: str, number: int, expected: str) -> None:
    start = time.monotonic()
    trajectory = await play(load_openenv(f"openenv:ws://{guess}?timeout_s={1.5 if number == 101 else 15}"), FIVE, script(str(number)))
    assert outcome(trajectory) == ("env_error", None)
    assert expected in str(trajectory.error)
    assert time.monotonic() - start < 10


async def test_a_full_server_is_waited_for() -> None:
    with env_servers.module("open_env", "1") as server:
        cls = load_openenv(f"openenv:ws://127.0.0.1:{server.port}")
        trajectories = await asyncio.gather(*(play(cls, FIVE, bisect, n) for n in range(4)))
        assert [outcome(trajectory) for trajectory in trajectories] == [("finished", 1.0)] * 4
        holder = load_openenv(f"openenv:ws://127.0.0.1:{server.port}")()
        await holder.reset(_reset_state(FIVE))
        hasty = load_openenv(f"openenv:ws://127.0.0.1:{server.port}?timeout_s=2")
        start = time.monotonic()
        refused = await play(hasty, FIVE, bisect)
        assert outcome(refused) == ("env_error", None)
        assert "no session within 2 s; last: CAPACITY_REACHED" in str(refused.error)
        assert 1.9 < time.monotonic() - start < 10
        await holder.close()
        assert outcome(await play(cls, FIVE, bisect)) == ("finished", 1.0)


def _reset_state(task: Task) -> Any:
    from agentrl import ResetState

    return ResetState(observation=task.prompt, label=None, task=task, seed=3)


async def test_a_server_killed_in_the_middle() -> None:
    with env_servers.module("open_env", "2") as server:

        def write(turn: int, text: str) -> str:
            if turn == 1:
                server.kill()
            return "9"

        trajectory = await play(load_openenv(f"openenv:ws://127.0.0.1:{server.port}"), FIVE, write)
        assert outcome(trajectory) == ("env_error", None)
        assert "the connection was closed" in str(trajectory.error)
        again = await play(load_openenv(f"openenv:ws://127.0.0.1:{server.port}"), FIVE, bisect)
        assert outcome(again) == ("env_error", None)
        assert "Connect" in str(again.error)


async def test_rows_choose_what_reset_is_given(guess: str) -> None:
    task = Task("Find it.", id="row", seed=1, metadata={"reset": {"high": 2, "seed": 5}})
    trajectory = await play(load_openenv(f"openenv:ws://{guess}"), task, script("1", "2"))
    assert "user\nFind it.\ntext: A number from 1 to 2." in said(trajectory)
    assert outcome(trajectory) == ("finished", 1.0)


async def test_a_formatter_in_a_file(guess: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "words.py").write_text("def shout(observation):\n    return observation['text'].upper()\n")
    monkeypatch.chdir(tmp_path)
    spec = load_agent(f"openenv:ws://{guess}?formatter=words.py:shout&num_tasks=3")
    assert f"formatter={tmp_path}/words.py:shout" in spec.spec
    monkeypatch.chdir("/")
    cls = spec.load()
    assert [task.seed for task in cls.tasks()] == [0, 1, 2]
    trajectory = await play(cls, FIVE, bisect)
    assert "user\nA NUMBER FROM 1 TO 9.<|im_end|>" in said(trajectory)


async def test_a_class_of_ones_own(guess: str) -> None:
    class Words(OpenEnvEnv):
        url = f"ws://{guess}"

        def format_observation(self, observation: Mapping[str, Any]) -> str:
            return f"({observation['text']})"

        def parse_action(self, text: str) -> dict[str, Any]:
            return {"number": {"four": 4, "nine": 9}[text]}

    trajectory = await play(Words, FIVE, script("nine", "four"))
    assert outcome(trajectory) == ("finished", 1.0)
    assert "(Lower.)" in said(trajectory)


Handler = Callable[[ServerConnection], Awaitable[None]]


@asynccontextmanager
async def sockets(handler: Handler) -> AsyncIterator[str]:
    """A WebSocket server that offers compression and does as `handler` says."""
    async with serve_sockets(handler, "127.0.0.1", 0, max_size=None) as server:
        yield f"127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"


def answers(*frames: Any) -> Handler:
    """One frame per question; the last one is for steps."""

    async def handler(connection: ServerConnection) -> None:
        assert not connection.protocol.extensions  # none was asked for
        for frame in frames:
            await connection.recv()
            await connection.send(frame if isinstance(frame, str | bytes) else json.dumps(frame))
        await connection.wait_closed()

    return handler


def observed(done: Any = False, reward: Any = None, observation: Any = None) -> dict[str, Any]:
    return {
        "type": "observation",
        "data": {"observation": {"text": "x"} if observation is None else observation, "reward": reward, "done": done},
    }


async def drip(connection: ServerConnection) -> None:
    await connection.recv()
    await connection.send(json.dumps(observed()))
    async for _ in connection:
        while True:
            await connection.ping()
            await asyncio.sleep(0.05)


def endless(piece: str) -> Handler:
    async def handler(connection: ServerConnection) -> None:
        await connection.recv()

        async def pieces() -> AsyncIterator[str]:
            while True:
                yield piece

        await connection.send(pieces())

    return handler


LIES: dict[str, tuple[Handler, str]] = {
    "drip": (drip, "no answer within 1 s"),
    "endless": (endless("x" * 100_000), "larger than 1048576 bytes"),
    "NaN": (answers(observed(), '{"type": "observation", "data": {"observation": {}, "reward": NaN, "done": true}}'), "NaN is no number"),
    "reward": (answers(observed(), observed(True, "1")), "must be a number"),
    "no reward": (answers(observed(), observed(True)), "no step of it had a reward"),
    "deep": (answers("[" * 200 + "]" * 200), "nested deeper"),
    "bytes": (answers(b"{}"), "in bytes"),
    "text": (answers("hello"), "not JSON"),
    "no observation": (answers({"type": "observation", "data": {}}), "is no observation"),
    "no mapping": (answers(observed(observation=[1])), "is no observation"),
    "done": (answers(observed(), observed("yes", 1.0)), "is no observation"),
    "over": (answers(observed(True, 1.0)), "was over when it began"),
    "factory": (answers({"type": "error", "data": {"code": "FACTORY_ERROR", "message": "no disk"}}), "FACTORY_ERROR: no disk"),
    "error": (answers(observed(), {"type": "error", "data": 7}), "ERROR"),
}


@pytest.mark.parametrize("name", LIES)
async def test_hostile_answers(name: str) -> None:
    handler, expected = LIES[name]

    class Env(OpenEnvEnv):
        timeout_s = 1.0 if name == "drip" else 15.0
        _action: ClassVar[Any] = {}  # these servers do not say

    async with sockets(handler) as address:
        Env.url = f"ws://{address}"
        start = time.monotonic()
        trajectory = await play(Env, FIVE, script('{"a": 1}'))
        assert outcome(trajectory) == ("env_error", None)
        assert expected in str(trajectory.error)
        assert time.monotonic() - start < 10


async def test_a_redirect_is_not_followed() -> None:
    async def elsewhere(request: Request) -> None:
        if request.path == "/schema":
            await request.answer({}, status=404)
        else:
            await request.answer({}, status=307, Location="ws://127.0.0.1:1/ws")

    async with serve(elsewhere) as server:
        trajectory = await play(load_openenv(f"openenv:{server.url.replace('http', 'ws')}"), FIVE, bisect)
        assert outcome(trajectory) == ("env_error", None)
        assert "redirects are not followed" in str(trajectory.error)
        assert len(server.requests) == 2


def fields(**properties: Any) -> Any:
    env = load_openenv("openenv:ws://127.0.0.1:1")()
    env.schema = {"properties": {"metadata": {}, **properties}, "required": list(properties)}
    return env


@pytest.mark.parametrize(
    ("field", "text", "action"),
    [
        ({"type": "string"}, " hi ", "hi"),
        ({}, "hi", "hi"),
        ({"type": "integer"}, "from 3 to -4.", -4),
        ({"type": "number"}, "it is 2.5", 2.5),
        ({"type": "boolean"}, "Yes, or no", False),
        ({"enum": ["left", "right"]}, "not left but RIGHT", "right"),
        ({"type": "array"}, '{"a": [1]}', [1]),
        ({"type": "integer"}, "none", ValueError),
        ({"type": "boolean"}, "perhaps", ValueError),
        ({"enum": ["left"]}, "up", ValueError),
        ({"type": "array"}, "[1]", ValueError),
    ],
)
def test_the_only_field_of_an_action(field: Any, text: str, action: Any) -> None:
    if action is ValueError:
        with pytest.raises(ValueError, match=r"Write|Say|Choose"):
            fields(a=field).parse_action(text)
    else:
        assert fields(a=field).parse_action(text) == {"a": action}


def test_several_fields_are_written_in_json_or_line_by_line() -> None:
    env = fields(a={"type": "integer"}, b={"type": "string"})
    assert env.parse_action('{"a": 1, "b": "x"}') == {"a": 1, "b": "x"}
    assert env.parse_action('I try this.\n```json\n{"a": 1, "b": "x"}\n```') == {"a": 1, "b": "x"}
    assert env.parse_action("a: 1\nb = x y") == {"a": 1, "b": "x y"}
    with pytest.raises(ValueError, match="JSON object with a, b"):
        env.parse_action("1")


def test_optional_fields_are_not_lost_and_the_model_is_told_of_all() -> None:
    env = fields(a={"type": "integer", "description": "the guess"}, b={"type": "string", "enum": ["x", "y"]})
    env.schema = {**env.schema, "required": ["a"]}
    with pytest.raises(ValueError, match="with a and perhaps b"):
        env.parse_action("1 x")
    assert env.describe_action().splitlines()[1:] == ["  a: integer (the guess)", "  b: one of x, y, optional"]
    assert fields(a={"type": "integer"}).describe_action() == ""


def test_observations_as_text() -> None:
    env = load_openenv("openenv:ws://127.0.0.1:1")()
    assert env.format_observation({"message": "Hi", "metadata": {"a": 1}, "error": None}) == "Hi"
    assert env.format_observation({"board": [[0, 1]], "turn": "x"}) == "board: [[0, 1]]\nturn: x"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("openenv:http://host", "is not the address"),
        ("openenv:ws://host?sessions=3", "no option 'sessions'"),
        ("openenv:ws://host?num_tasks=0", "num_tasks = 0 is out of range"),
        ("openenv:ws://host?timeout_s=-1", "out of range"),
        ("openenv:ws://host?formatter=nowhere.py:f", "there is no such file"),
    ],
)
def test_specifications_that_cannot_be_used(spec: str, expected: str) -> None:
    with pytest.raises(EnvLoadError, match=expected):
        load_openenv(spec)
