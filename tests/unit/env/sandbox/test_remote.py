"""Remote sandboxes: a server and its clients, lost connections, clients that are gone, keys, and requests that are refused."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.cli.main import main
from agentrl.cli.serve_sandboxes import ServeSandboxesArgs, serving_key
from agentrl.cluster.plan import RunConfig
from agentrl.config.rules import ISOLATION_RULES
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError, SandboxError
from agentrl.core.serving import LoopbackServer
from agentrl.env.sandbox import protocol, server
from agentrl.env.sandbox.sandbox import Sandbox
from agentrl.env.sandbox.server import SandboxServer
from agentrl.env.sandbox.spec import ExecResult, SandboxChoice, SandboxSpec, use_choice
from agentrl.env.tools.python import run_python
from tests.sandboxes import IMAGE, container_engine, needs_sandbox

pytestmark = pytest.mark.anyio
KEY = "a key for tests 0123456789"
CHOICES = [
    pytest.param(SandboxChoice(kind="none"), id="none"),
    pytest.param(SandboxChoice(kind="local"), id="local", marks=needs_sandbox),
    pytest.param(SandboxChoice(kind="container", image=IMAGE), id="container", marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the client, and short waits."""
    monkeypatch.setenv("AGENTRL_SANDBOX_KEY", KEY)
    monkeypatch.setattr(protocol, "WAIT_S", 0.2)
    monkeypatch.setattr(server, "LOOK_S", 0.1)


@asynccontextmanager
async def served(choice: SandboxChoice | None = None, max_running: int = 8) -> AsyncIterator[tuple[SandboxServer, str]]:
    """A server, and its address, to which remote sandboxes of this context go."""
    if choice is not None and choice.kind == "container":
        container_engine()
    app = SandboxServer(KEY, choice or SandboxChoice(kind="none"), max_running)
    listening = LoopbackServer(app, name="sandboxes")
    url = await listening.start()
    watching = asyncio.create_task(app.watch())
    use_choice(SandboxChoice(kind="remote", image="", url=url))
    try:
        yield app, url
    finally:
        watching.cancel()
        await app.close()
        await listening.close()


async def soon(condition: Callable[[], object]) -> bool:
    for _ in range(200):
        if condition():
            return True
        await asyncio.sleep(0.05)
    return False


@pytest.mark.parametrize("choice", CHOICES)
async def test_a_remote_sandbox_does_what_others_do(choice: SandboxChoice, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "a").write_text("1")
    async with served(choice):
        async with Sandbox() as sandbox:
            await sandbox.write("in/a.txt", "hello")
            line = "cat ../in/a.txt; cat > b.bin; echo $MODE; exit 3"
            result = await sandbox.exec("sh", "-c", line, stdin=b"\xff\x00", env={"MODE": "fast"}, cwd="in", timeout_s=20)
            assert result == ExecResult(code=3, output="hellofast\n", ended="exit")
            assert await sandbox.read("in/b.bin") == b"\xff\x00"
            await sandbox.copy_in(source, "tests")
            await sandbox.copy_in(source / "deep" / "a", "single")
            assert (await sandbox.exec(sandbox.python, "-c", "print(open('tests/deep/a').read() + open('single').read())")).output == "11\n"
            await sandbox.exec("ln", "-s", "/etc/passwd", "tests/link")
            await sandbox.copy_out("tests", tmp_path / "out")
            assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == ["a", "deep"]
            assert (await sandbox.exec("sleep", "60", timeout_s=0.5)).ended == "timeout"
            assert (await sandbox.exec("yes", output=100)).ended == "output"
            with pytest.raises(FileNotFoundError):
                await sandbox.read("nothing")
            with pytest.raises(SandboxError, match="links are not followed"):
                await sandbox.read("tests/link")
            with pytest.raises(SandboxError, match="the folder of a remote sandbox is on its server"):
                _ = sandbox.folder
        assert await run_python("print(6 * 7)") == "42"


async def test_files_of_the_client_are_not_on_the_server() -> None:
    async with served():
        for spec in (SandboxSpec(image="./box"), SandboxSpec(read=("/opt/tools",))):
            with pytest.raises(SandboxError, match="is on this machine, and the sandbox is not"):
                async with Sandbox(spec):
                    pass
        async with Sandbox() as sandbox:
            with pytest.raises(SandboxError, match="use copy_in"):
                await sandbox.exec("true", read=["/opt/tools"])


async def test_a_cancelled_program_is_ended() -> None:
    async with served() as (app, _), Sandbox() as sandbox:
        running = asyncio.create_task(sandbox.exec("sh", "-c", "echo > begun; sleep 60"))
        (held,) = app._held.values()
        assert await soon(lambda: (held.opening.result().folder / "begun").exists())
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert held.programs["1"].done()


async def test_a_program_is_started_once_although_its_request_is_sent_again() -> None:
    async with served() as (_, url), httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}) as client:
        root = f"{url}{protocol.ROOT}/one"
        while (await client.put(root, json={"spec": {}})).json()["state"] != "open":
            pass
        body = {"words": ["sh", "-c", "echo x >> count; sleep 0.5; wc -l < count"]}
        await asyncio.gather(*(client.put(f"{root}/programs/1", json=body) for _ in range(3)))
        while (await client.put(f"{root}/programs/1", json={})).json() == {"state": "running"}:
            pass
        for _ in range(2):
            assert (await client.put(f"{root}/programs/1", json={})).json() == {"code": 0, "output": "1\n", "ended": "exit"}
        for _ in range(2):
            assert (await client.delete(root)).status_code == 200
        gone = await client.post(f"{root}/lease", json={})
        assert (gone.status_code, "there is no such sandbox" in gone.json()["error"]) == (404, True)


async def test_a_server_that_is_full_makes_clients_wait() -> None:
    async with served(max_running=1) as (app, _):
        most = 0

        async def one() -> None:
            nonlocal most
            async with Sandbox() as sandbox:
                most = max(most, len(app._held))
                await sandbox.exec("sleep", "0.2")

        await asyncio.gather(one(), one())
        assert (most, app.num_opened) == (1, 2)


@pytest.mark.slow
async def test_sandboxes_of_clients_that_are_gone_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    client = (
        "import asyncio, sys\nfrom agentrl import Sandbox, SandboxSpec\nfrom agentrl.env.sandbox.spec import SandboxChoice, use_choice\n"
        "async def main():\n use_choice(SandboxChoice(kind='remote', url=sys.argv[1]))\n"
        " async with Sandbox() as sandbox:\n  await sandbox.exec('sleep', '3598', timeout_s=100)\nasyncio.run(main())"
    )
    async with served() as (app, url):
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", client, url)
        try:
            assert await soon(lambda: any(held.programs for held in app._held.values()))
            folder = next(iter(app._held.values())).opening.result().folder
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        monkeypatch.setattr(protocol, "LEASE_S", 0.5)
        assert await soon(lambda: not app._held and not folder.exists())
    listed = await asyncio.create_subprocess_exec("pgrep", "-f", "^sleep 3598", stdout=subprocess.DEVNULL)
    assert await listed.wait() == 1


async def test_a_client_that_works_keeps_its_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LEASE_S", 0.6)
    async with served(), Sandbox() as sandbox:
        await asyncio.sleep(1.5)
        assert (await sandbox.exec("echo", "here")).output == "here\n"


async def test_a_server_that_has_forgotten_a_sandbox_is_a_failure() -> None:
    async with served() as (app, _):
        sandbox = Sandbox()
        await sandbox.__aenter__()
        await app.close()
        with pytest.raises(SandboxError, match="there is no such sandbox"):
            await sandbox.exec("true")
        await sandbox.__aexit__(None, None, None)


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("", {"spec": {"kind": "none"}}, "there is no field 'kind'"),
        ("", {"spec": {"memory_mib": "much"}}, "memory_mib: must be of the type int"),
        ("", {"spec": {"network": 1}}, "network: must be of the type bool"),
        ("", {"spec": 3}, "is no object"),
        ("/programs/1", {"words": []}, "words: must be a list"),
        ("/programs/1", {"words": ["a"], "stdin": "%"}, "is no text in base64"),
        ("/programs/1", {"words": ["a"], "env": {"A": 1}}, "env: must be an object of texts"),
        ("/programs/1", {"words": ["a"], "timeout_s": "long"}, "timeout_s: must be a number"),
        ("/programs/1", {"words": ["a"], "keep": 3}, "keep: must be of the type str"),
        ("/write", {"name": "a", "data": "%"}, "is no text in base64"),
        ("/write", {"name": "", "data": ""}, "name: must be the name"),
        ("/write", {"name": "../a", "data": ""}, "is no path below"),
        ("/read", {"name": "a", "limit": "x"}, "limit: must be a number"),
        ("/copy_in", {"name": "a", "data": "aGVsbG8="}, "is no archive"),
    ],
)
async def test_what_is_not_understood_is_refused(path: str, body: dict[str, Any], problem: str) -> None:
    async with served() as (_, url), httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}) as client:
        root = f"{url}{protocol.ROOT}/one"
        if path:
            await client.put(root, json={"spec": {}})
        answer = await client.request("PUT" if not path or "programs" in path else "POST", root + path, json=body)
        assert (answer.status_code, problem in answer.json()["error"]) == (422, True), answer.text


async def test_without_the_key_nothing_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as (app, url), httpx.AsyncClient() as client:
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": f"Bearer {KEY[:-1]}"}):
            answer = await client.put(f"{url}{protocol.ROOT}/one", json={"spec": {}}, headers=headers)
            assert answer.status_code == 401
        monkeypatch.setenv("AGENTRL_SANDBOX_KEY", "wrong")
        with pytest.raises(SandboxError, match="the key is not that of this server"):
            async with Sandbox():
                pass
        assert app.num_opened == 0


def test_a_server_that_others_reach_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serving_key(ServeSandboxesArgs(host="0.0.0.0")) == KEY
    monkeypatch.setenv("AGENTRL_SANDBOX_KEY", "short")
    with pytest.raises(ConfigError, match="too short"):
        serving_key(ServeSandboxesArgs())
    monkeypatch.delenv("AGENTRL_SANDBOX_KEY")
    assert len(serving_key(ServeSandboxesArgs())) >= 24
    with pytest.raises(ConfigError, match="without a key"):
        serving_key(ServeSandboxesArgs(host="0.0.0.0"))
    assert main(["serve-sandboxes", "--host", "0.0.0.0", "--sandbox", "none"]) == 2


def test_settings_of_remote_sandboxes_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(agent: str = "env.py", **values: object) -> None:
        for rule in ISOLATION_RULES:
            rule(changed(TrainConfig(run=RunConfig(agent=agent)), **values))

    remote = {"sandbox": "remote", "sandbox_url": "http://box:8300"}
    check(**remote)
    for values, problem in (
        ({"sandbox": "remote"}, "is missing"),
        ({**remote, "sandbox_url": "box"}, "is no address"),
        ({"sandbox_url": "http://box:8300"}, "has no effect on sandboxes of this machine"),
        ({**remote, "sandbox_read": ("/opt",)}, "names files of this machine"),
        ({**remote, "agent": "command:ls {prompt}#judge=true"}, "works in a folder of this machine"),
    ):
        with pytest.raises(ConfigError, match=problem):
            check(**values)
    monkeypatch.delenv("AGENTRL_SANDBOX_KEY")
    with pytest.raises(ConfigError, match="is not set"):
        check(**remote)


@pytest.mark.slow
def test_the_command_serves_until_a_signal(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "agentrl", "serve-sandboxes", "--sandbox", "none", "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving none sandboxes at http://127.0.0.1:")
    assert line.rstrip().endswith(f"key {KEY}")
    url = line.split()[4]
    answer = httpx.put(f"{url}{protocol.ROOT}/one", json={"spec": {}}, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.json()["state"] == "open"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 0
    process.stdout.close()


@pytest.mark.parametrize("has_filter", [True, False])
def test_an_archive_stays_below_its_folder(has_filter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_filter:  # Python before 3.11.4
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "run.sh").write_text("true")
    (source / "deep" / "run.sh").chmod(0o4755)
    copied = protocol.unpack_folder(protocol.pack_folder(source), tmp_path / "good")
    assert ((copied / "deep" / "run.sh").read_text(), (copied / "deep" / "run.sh").stat().st_mode & 0o7777) == ("true", 0o755)
    (source / "out").symlink_to("/etc")
    outside = io.BytesIO()
    with tarfile.open(fileobj=outside, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../outside"))
    for number, text in enumerate((protocol.pack_folder(source), protocol.pack(outside.getvalue()))):
        with pytest.raises(ValueError, match=r"link|outside"):
            protocol.unpack_folder(text, tmp_path / f"bad{number}" / "inner")
    assert not list(tmp_path.rglob("outside"))
