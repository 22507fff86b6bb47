"""Tools of servers of the Model Context Protocol: a real one in Python, in a sandbox and over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mcp
import pytest

from agentrl import McpServer, SandboxSpec, StepState, ToolEnv
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError, EnvLoadError, RemoteError, SandboxError
from agentrl.core.process import free_port
from agentrl.core.types import Status, Trajectory
from agentrl.env.isolation.system import processes
from agentrl.env.sandbox.spec import SandboxChoice, use_choice
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.environment import Toolbox
from agentrl.env.tools.mcp import McpSessions
from agentrl.env.tools.mcp_servers import servers_of
from agentrl.suites.load import check_servers, load_agent
from tests.sandboxes import IMAGE, container_engine, containers, needs_sandbox
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import PATIENT, Scene, says

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

FILE = Path(__file__).parent / "mcp_server.py"
COMMAND = (sys.executable, str(FILE))
SERVER = McpServer(command=COMMAND)


@contextlib.asynccontextmanager
async def toolbox(*given: Any, **options: Any) -> Any:
    sessions = McpSessions()
    try:
        await sessions.open(servers_of(given, "mcp"))
        yield Toolbox((), others=sessions.tools, **options)
    finally:
        await sessions.close()


async def outcome(box: Toolbox, name: str, /, **arguments: Any) -> tuple[str, str]:
    found = await box.run(ToolCall(name, arguments))
    return found.kind, found.text


async def gone(word: str = str(FILE)) -> bool:
    """Return True once no process has this word in its command line, the server's file if none is given."""
    for _ in range(50):
        gc.collect()
        if not any(word.encode() in command_line(pid).split(b"\0") for pid in processes()):
            return True
        await asyncio.sleep(0.1)
    return False


def command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@needs_sandbox
async def test_tools_of_a_program(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    async with toolbox(McpServer(command=COMMAND, env={"PLACE": "here"}), timeout_s=3.0) as box:
        schema = box.schemas()[0]["function"]
        assert (schema["name"], schema["description"]) == ("add", "Add two numbers.")
        assert schema["parameters"]["properties"]["a"]["type"] == "integer"
        assert await outcome(box, "add", a=1, b=2) == ("ok", "3")
        assert (await box.run(ToolCall("add", (4,)))).text == "5"
        assert await outcome(box, "add", a="x") == ("bad_call", "Error: add: a: 'x' is not of type 'integer'")
        assert await outcome(box, "add", b=1) == ("bad_call", "Error: add: 'a' is a required property")
        assert (await box.run(ToolCall("add", (1, 2, 3)))).text == "Error: add takes 2 arguments, not 3"
        kind, text = await outcome(box, "refuse", reason="closed")
        assert (kind, text.startswith("Error: "), "no: closed" in text) == ("failed", True, True)
        assert await outcome(box, "variable", name="PLACE") == ("ok", "here")
        kind, text = await outcome(box, "look", path=str(secret))
        assert (kind, "hidden" in text) == ("failed", False)  # the sandbox shows no files but the system's and the server's own
        assert [(await outcome(box, "count"))[1] for _ in range(2)] == ["1", "2"]
    assert await gone()


@pytest.mark.slow
@needs_sandbox
async def test_a_call_that_takes_too_long_is_an_observation_and_the_server_goes_on() -> None:
    async with toolbox(SERVER, timeout_s=0.3) as box:
        assert await outcome(box, "sleep", seconds=1.0) == ("failed", "Error: TimeoutError: sleep gave no result within 0.3 s")
        await asyncio.sleep(1.0)
        assert await outcome(box, "add", a=1) == ("ok", "2")


@pytest.mark.slow
@needs_sandbox
async def test_a_server_that_dies_or_uses_up_its_memory_is_an_error_of_the_environment() -> None:
    async with toolbox(SERVER) as box:
        with pytest.raises(RemoteError, match=r"mcp_server.py: ended with code 7; it printed last: '.*the end is near'"):
            await outcome(box, "die", code=7)
        with pytest.raises(RemoteError, match="ended with code 7"):
            await outcome(box, "add", a=1)
    async with toolbox(McpServer(command=COMMAND, sandbox=SandboxSpec(memory_mib=256))) as box:
        kind, text = await outcome(box, "fill", mib=1000)
        assert kind == "failed", text  # one process is refused more memory, and Python says so


@pytest.mark.slow
@needs_sandbox
async def test_servers_that_do_not_come_up() -> None:
    with pytest.raises(RemoteError, match=r"python\S* -c .*: ended with code 3"):
        async with toolbox(McpServer(command=(sys.executable, "-c", "raise SystemExit(3)"))):
            pass
    started = time.monotonic()
    with pytest.raises(RemoteError, match=r"did not list its tools within 0\.5 s"):
        async with toolbox(McpServer(command=("sleep", "3571"), start_timeout_s=0.5)):
            pass
    assert time.monotonic() - started < 8
    with pytest.raises(ConfigError, match=r"has no tool 'pow'. There is add, count"):
        async with toolbox(McpServer(command=COMMAND, tools=("add", "pow"))):
            pass
    with pytest.raises(RemoteError, match=r"no-such-program: .*not found"):
        async with toolbox("no-such-program --x"):
            pass
    assert await gone("3571")


async def test_a_program_is_refused_where_sandboxes_are_elsewhere() -> None:
    use_choice(SandboxChoice(kind="remote", url="http://127.0.0.1:1"))
    with pytest.raises(SandboxError, match="cannot run in a remote sandbox; name the address of a server"):
        async with toolbox(SERVER):
            pass


@pytest.mark.slow
@needs_sandbox
async def test_episodes_share_a_server_or_have_their_own() -> None:
    shared = McpServer(command=COMMAND, tools=("count",), shared=True)
    async with toolbox(shared) as first:
        async with toolbox(shared) as second, toolbox(McpServer(command=COMMAND, tools=("count",))) as own:
            assert [(await outcome(box, "count"))[1] for box in (first, second, own)] == ["1", "2", "1"]
            assert [tool.name for tool in own.tools.values()] == ["count"]
        assert (await outcome(first, "count"))[1] == "3"
    assert await gone()


@pytest.fixture
def address() -> Iterator[str]:
    """A server over HTTP."""
    port = free_port("127.0.0.1")
    process = subprocess.Popen([*COMMAND, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


async def test_tools_over_http(address: str) -> None:
    for _ in range(100):
        with contextlib.suppress(OSError):
            (await asyncio.open_connection("127.0.0.1", int(address.split(":")[2].split("/")[0])))[1].close()
            break
        await asyncio.sleep(0.1)
    async with toolbox(address) as box:
        assert await outcome(box, "add", a=1, b=2) == ("ok", "3")
        with pytest.raises(RemoteError, match=r"127\.0\.0\.1"):
            await outcome(box, "die", code=0)
    with pytest.raises(RemoteError, match=f"the MCP server {address}: "):
        async with toolbox(address):
            pass


class Sums(ToolEnv):
    mcp = (SERVER,)

    def judge(self, state: StepState) -> float:
        return float(state.action_text == "3")

    def close(self) -> None:  # without a call of the one above it
        """Release nothing."""


async def play(cls: type[ToolEnv], *texts: str, **settings: Any) -> Trajectory:
    return await Scene(cls, ScriptedEngine(answer=says(*texts), max_model_len=4096), changed(PATIENT, **settings)).play()


@pytest.mark.slow
@needs_sandbox
async def test_an_episode_with_a_server() -> None:
    trajectory = await play(Sums, '{"tool":"add","args":[1,2]}', "3")
    assert (trajectory.error, trajectory.reward, trajectory.metrics["tool_calls"]) == (None, 1.0, 1.0)
    assert "Add two numbers." in trajectory.turns[0].prompt_text
    dead = await play(Sums, '{"tool":"die","args":[5]}', "3")
    assert (dead.status, dead.reward) == (Status.ENV_ERROR, None)
    assert "ended with code 5" in (dead.error or "")
    del dead
    assert await gone()


@pytest.mark.slow
@needs_sandbox
async def test_servers_of_the_flag_come_besides(tmp_path: Path) -> None:
    file = tmp_path / "servers.json"
    servers = {"tests": {"command": sys.executable, "args": [str(FILE)], "tools": ["add"], "shared": True}}
    file.write_text(json.dumps({"mcpServers": servers}))
    bare = type("Bare", (Sums,), {"mcp": ()})
    trajectory = await play(bare, '{"tool":"add","args":[1,2]}', "3", mcp=(str(file),))
    assert (trajectory.error, trajectory.reward) == (None, 1.0)


PACKAGES = str(Path(mcp.__file__).parents[1])


def contained(image: str = IMAGE, memory_mib: int = 512, *command: str) -> McpServer:
    """A server in a container of an image with Python, to which the package mcp is shown."""
    box = SandboxSpec(kind="container", image=image, memory_mib=memory_mib, read=(PACKAGES,))
    return McpServer(command=command or ("python3", str(FILE)), env={"PYTHONPATH": PACKAGES}, sandbox=box, start_timeout_s=60.0)


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Look after the test that no container is left."""
    engine = container_engine()
    yield
    assert containers(engine) == []


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
async def test_a_server_in_a_container(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hidden")
    async with toolbox(contained(), timeout_s=10.0) as box:
        assert await outcome(box, "add", a=1, b=2) == ("ok", "3")
        assert await outcome(box, "add", a="x") == ("bad_call", "Error: add: a: 'x' is not of type 'integer'")
        kind, text = await outcome(box, "refuse", reason="closed")
        assert (kind, "no: closed" in text) == ("failed", True)
        assert (await outcome(box, "look", path=str(tmp_path / "secret")))[0] == "failed"
        assert await outcome(box, "variable", name="HOSTNAME") == ("ok", "sandbox")
        assert [(await outcome(box, "count"))[1] for _ in range(2)] == ["1", "2"]
        with pytest.raises(RemoteError, match=r"mcp_server.py: ended with code 7; it printed last: '.*the end is near'"):
            await outcome(box, "die", code=7)
        with pytest.raises(RemoteError, match="ended with code 7"):
            await outcome(box, "add", a=1)
    assert await gone()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
async def test_a_server_that_uses_up_its_container_or_is_not_in_it() -> None:
    async with toolbox(contained(IMAGE, 128), timeout_s=60.0) as box:
        with pytest.raises(RemoteError, match="was ended at its limit of memory"):
            await outcome(box, "fill", mib=1000)
    with pytest.raises(RemoteError, match=r"no-such-program: ended with code 127; it printed last: '.*not found'"):
        async with toolbox(contained(IMAGE, 128, "no-such-program")):
            pass
    with pytest.raises(SandboxError, match="there is no image 'localhost/agentrl-tests:nothing' here"):
        async with toolbox(contained("localhost/agentrl-tests:nothing")):
            pass


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
async def test_servers_of_the_flag_run_in_the_containers_of_the_run(tmp_path: Path) -> None:
    server = {"command": "python3", "args": [str(FILE)], "env": {"PYTHONPATH": PACKAGES}, "read": [PACKAGES], "tools": ["add", "die"]}
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"tests": server}}))
    bare = type("Bare", (Sums,), {"mcp": ()})
    box = {"mcp": (str(tmp_path / "servers.json"),), "sandbox": "container", "sandbox_image": IMAGE}
    right = await play(bare, '{"tool":"add","args":[1,2]}', "3", **box)
    assert (right.error, right.reward) == (None, 1.0)
    dead = await play(bare, '{"tool":"die","args":[5]}', "3", **box)
    assert (dead.status, dead.reward) == (Status.ENV_ERROR, None)
    assert "ended with code 5" in (dead.error or "")
    del right, dead
    gc.collect()
    assert await gone()


@pytest.mark.slow
@needs_sandbox
async def test_the_example_of_the_page(tmp_path: Path) -> None:
    page = (Path(__file__).parents[4] / "docs" / "mcp.md").read_text()
    server, env = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "server.py").write_text(server)
    (tmp_path / "env.py").write_text(env)
    said = [line.split(maxsplit=1) for line in re.findall(r"```text\n(.*?)```", page, re.DOTALL)[0].splitlines()]
    texts = [text for role, text in said if role == "assistant"]
    cls = load_agent(str(tmp_path / "env.py")).load()
    task = next(task for task in cls.tasks() if task.prompt == said[0][1])
    scene = Scene(cls, ScriptedEngine(answer=says(*texts), max_model_len=10_000), changed(PATIENT, max_new_tokens=400))
    trajectory = await replace(scene, group_request=replace(Scene.group_request, task=task)).play()
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    shown = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said[:-1]).rstrip()
    assert shown in "".join(turn.prompt_text + turn.text for turn in trajectory.turns)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is no server"),
        ("cat 'x", "cannot be split into words"),
        ("http://", "is not the address of a server"),
        ("missing.json", "holds no mcpServers: FileNotFoundError"),
    ],
)
def test_servers_that_cannot_be_used(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        servers_of((text,), "--mcp")


@pytest.mark.parametrize(
    ("servers", "problem"),
    [
        ({"a": {"comand": "x"}}, "comand"),
        ({"a": {}}, "needs either a command or an address"),
        ({"a": 5}, "TypeError"),
        ([], "AttributeError"),
    ],
)
def test_files_that_cannot_be_used(servers: Any, problem: str, tmp_path: Path) -> None:
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    with pytest.raises(ConfigError, match=problem):
        servers_of((str(tmp_path / "servers.json"),), "--mcp")


def test_a_file_says_what_a_server_needs(tmp_path: Path) -> None:
    found = {"command": "node", "args": ["a"], "image": "./box", "read": ["/opt/a"], "memory_mib": 64, "network": True, "shared": True}
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"a": found}}))
    (server,) = servers_of((str(tmp_path / "servers.json"),), "--mcp")
    assert server == McpServer(
        command=("node", "a"), shared=True, sandbox=SandboxSpec(image="./box", read=("/opt/a",), memory_mib=64, network=True)
    )


def test_an_environment_names_servers_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bad.py"
    path.write_text("from agentrl import ToolEnv\nclass Env(ToolEnv):\n    mcp = ('http://',)\n")
    with pytest.raises(EnvLoadError, match=r"is not the address of a server"):
        load_agent(str(path))
    with pytest.raises(ConfigError, match=r"--mcp = 'cat': \w+ is no ToolEnv"):
        check_servers(load_agent(str(Path("envs/arithmetic.py"))), ("cat",))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package mcp, which is not installed. Run: pip install 'agentrl\[mcp\]'"):
        servers_of((SERVER,), "--mcp")
