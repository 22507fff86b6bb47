"""Sandboxes: what their programs can do and see, how limits end them, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.core.errors import SandboxError
from agentrl.env.isolation.system import processes
from agentrl.env.sandbox import folders, local, trees
from agentrl.env.sandbox.files import copy_beneath, copy_out_beneath, make_beneath, remove_beneath
from agentrl.env.sandbox.sandbox import Sandbox
from agentrl.env.sandbox.spec import ExecResult, Kind, SandboxChoice, SandboxSpec, use_choice
from tests.sandboxes import IMAGE, container_engine, needs_sandbox

pytestmark = pytest.mark.anyio

KINDS = [pytest.param("local", marks=needs_sandbox), "none", pytest.param("container", marks=pytest.mark.slow)]
every = pytest.mark.parametrize("kind", KINDS)


def spec_of(kind: Kind, **limits: int) -> SandboxSpec:
    """A spec for a kind of sandbox; skips the test where there are no containers."""
    if kind == "container":
        container_engine()
    return SandboxSpec(kind=kind, image=IMAGE, **limits)  # type: ignore[arg-type]


def running(word: str) -> list[int]:
    """Processes with a word on their command line."""
    found = []
    for pid in processes():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if word.encode() in words:
            found.append(pid)
    return found


async def sh(line: str, kind: Kind = "local", timeout_s: float = 20.0, **limits: int) -> ExecResult:
    async with Sandbox(spec_of(kind, **limits)) as sandbox:
        return await sandbox.exec("sh", "-c", line, timeout_s=timeout_s)


@every
async def test_files_stay_from_one_program_to_the_next(kind: Kind) -> None:
    async with Sandbox(spec_of(kind)) as sandbox:
        await sandbox.write("in/a.txt", "hello")
        first = await sandbox.exec("sh", "-c", "cat in/a.txt; cat > b.txt; exit 3", stdin=b"given")
        assert first == ExecResult(code=3, output="hello", ended="exit")
        await sandbox.write("b2.txt", await sandbox.read("b.txt"))
        assert (await sandbox.exec("cat", "b.txt", "b2.txt")).output == "givengiven"
        folder = sandbox.folder
        assert (await sandbox.exec("pwd")).output.strip() == str(folder)
    assert not folder.exists()
    with pytest.raises(SandboxError, match="is not open"):
        _ = sandbox.folder


@every
@pytest.mark.parametrize(
    ("line", "ended", "limits"),
    [
        ("sleep 60", "timeout", {}),
        ("yes", "output", {}),
        ("for i in 1 2 3 4 5 6 7 8 9; do head -c 3000000 /dev/zero > $i; done; sleep 60", "disk", {"disk_mib": 8}),
        ("mkdir a; cd a; seq 2000 | xargs touch; sleep 60", "disk", {"disk_mib": 1}),
        (
            "for i in 1 2 3; do PYTHON -S -c 'x = b\"1\" * 60 * 2**20; import time; time.sleep(60)' & done; wait",
            "memory",
            {"memory_mib": 80},
        ),
    ],
)
async def test_a_limit_ends_a_program(kind: Kind, line: str, ended: str, limits: dict[str, int]) -> None:
    line = line.replace("PYTHON", "python3" if kind == "container" else sys.executable)
    result = await sh(line, kind, 3.0 if ended == "timeout" else 20.0, **limits)
    assert result.ended == ended
    assert len(result.output) <= 64 * 1024
    if ended in ("disk", "memory"):
        with pytest.raises(SandboxError, match=f"used up the {ended}"):
            result.check()


@every
async def test_a_signal_is_told_from_an_exit(kind: Kind) -> None:
    assert (await sh("kill -ABRT $$", kind)).code == -signal.SIGABRT
    assert (await sh("exit 42", kind)).check().code == 42
    assert "no-such-program" in (await sh("exec no-such-program", kind)).output


@every
async def test_the_end_of_much_output_may_be_kept(kind: Kind) -> None:
    async with Sandbox(spec_of(kind)) as sandbox:
        result = await sandbox.exec("sh", "-c", "seq 100000", output=20, keep="last")
    assert result == ExecResult(code=0, output="\n99998\n99999\n100000\n", ended="exit")


@every
async def test_what_is_left_behind_is_ended_with_the_result(kind: Kind) -> None:
    assert (await sh("setsid sleep 3581 >/dev/null 2>&1 & sleep 0.1; echo $!", kind)).code == 0
    assert await asyncio.to_thread(soon, lambda: running("3581") == [])  # one that was killed may still be listed for a moment
    await sh("sleep 3582", kind, 0.5)
    assert await asyncio.to_thread(soon, lambda: running("3582") == [])
    task = asyncio.create_task(sh("sleep 3583", kind))
    assert await asyncio.to_thread(soon, lambda: bool(running("3583")))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(soon, lambda: running("3583") == [])


@every
async def test_files_that_a_program_leaves_count_when_it_has_ended_too(kind: Kind) -> None:
    result = await sh("for i in 1 2 3 4 5 6 7 8 9; do head -c 3000000 /dev/zero > $i; done", kind, disk_mib=8)
    assert result.ended == "disk"


@every
async def test_a_machine_without_memory_or_disk_is_a_failure_and_no_outcome(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "agentrl.env.sandbox." + ("in_container" if kind == "container" else "processes")
    monkeypatch.setattr(f"{module}.num_killed_of_machine", lambda: -1)
    with pytest.raises(SandboxError, match="this machine ran out of memory"):
        await sh("kill -9 $$", kind)
    assert (await sh("exit 3", kind)).code == 3
    monkeypatch.setattr("agentrl.env.sandbox.in_folder.free_bytes", lambda folder: 0)
    with pytest.raises(SandboxError, match=r"the disk of .* is full"):
        await sh("exit 3", kind)
    assert (await sh("true", kind)).code == 0


@needs_sandbox
async def test_a_wall_hides_all_but_the_system_and_what_is_named(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    other = "id -u; ls -d /proc/[0-9]*; cat /sys/class/net/lo/mtu; touch /usr/x"
    line = f"cat {tmp_path}/secret; {other}; ls -A /tmp /home /root 2>&1 | grep -v agentrl"
    output = (await sh(line)).output
    assert "No such file" in output
    assert "Read-only file system" in output
    assert len([word for word in output.split() if word.startswith("/proc/")]) < 6
    async with Sandbox(SandboxSpec(read=(str(tmp_path / "secret"),))) as sandbox:
        assert (await sandbox.exec("cat", str(tmp_path / "secret"))).output == "s"
        assert (
            "ead-only" in (await sandbox.exec("sh", "-c", f"echo x > {tmp_path}/secret")).output or (tmp_path / "secret").read_text() == "s"
        )


SHARES = """
import multiprocessing, os
queue = multiprocessing.Queue()
process = multiprocessing.Process(target=queue.put, args=("shared",))
process.start()
print(queue.get())
process.join()
for folder in ("/dev", "/dev/shm", "/tmp"):
    written = 0
    try:
        for number in range(9):
            with open(f"{folder}/{number}", "wb", buffering=0) as file:
                written += file.write(bytes(2**20))
    except OSError as error:
        print(folder, error.strerror, round(written / 2**20))
"""


@needs_sandbox
@pytest.mark.parametrize("is_root", [True, False])
async def test_processes_share_memory_of_limited_size(is_root: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_root:
        monkeypatch.setattr(local, "_may_take_users", lambda: False)
    async with Sandbox(SandboxSpec(kind="local", disk_mib=4)) as sandbox:
        lines = (await sandbox.exec(sandbox.python, "-c", SHARES)).output.splitlines()
    assert lines == ["shared", "/dev Read-only file system 0", "/dev/shm No space left on device 4", "/tmp No space left on device 4"]


@needs_sandbox
async def test_a_user_namespace_is_a_wall_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_may_take_users", lambda: False)
    result = await sh("id -u; setsid sleep 3584 >/dev/null 2>&1 & ls /home /root/.ssh; touch file && unshare -r true")
    assert result.output.split()[0] == str(local.USER)
    assert "unshare failed" in result.output
    assert running("3584") == []


CONNECT = """
import socket, sys
for port in map(int, sys.argv[1:]):
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(b"question" * 20000)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
            print(len(answer), answer[-6:].decode())
    except OSError as error:
        print(type(error).__name__)
"""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
async def test_one_address_alone_is_reached(kind: Kind) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read() + b"answer")
        writer.close()

    servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(2)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    async with Sandbox(spec_of(kind)) as sandbox:
        words = (sandbox.python, "-c", CONNECT, *map(str, ports))
        for network, expected in (
            (f"127.0.0.1:{ports[0]}", ["160006 answer", "ConnectionRefusedError"]),
            (False, ["ConnectionRefusedError"] * 2),
        ):
            assert (await sandbox.exec(*words, network=network)).output.splitlines() == expected
        several = "import subprocess, sys; [p.wait() for p in [subprocess.Popen(sys.argv[1:]) for _ in range(5)]]"
        result = await sandbox.exec(sandbox.python, "-c", several, *words[:-1], network=f"localhost:{ports[0]}")
        assert result.output.splitlines() == ["160006 answer"] * 5
        with pytest.raises(SandboxError, match=r"is no address that a program may connect to; write HOST:PORT"):
            await sandbox.exec("true", network="everywhere")
    for server in servers:
        server.close()


@needs_sandbox
async def test_processes_are_limited_for_each_sandbox_alone() -> None:
    line = "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 2 & done; echo started; wait"
    first, second = await asyncio.gather(sh(line, processes=6), sh(line, processes=40))
    assert "started" not in first.output
    assert second.output.split() == ["started"]


async def test_no_link_leads_outside(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    async with Sandbox(SandboxSpec(kind="none")) as sandbox:
        line = f"ln -s {tmp_path}/secret link; ln -s {tmp_path} folder; mkfifo pipe"
        await sandbox.exec("sh", "-c", line)
        for name in ("link", "folder/secret", "pipe", "../lock", "/etc/passwd", "."):
            with pytest.raises(SandboxError):
                await sandbox.read(name)
        for name in ("link", "folder/new", "../new"):
            with pytest.raises(SandboxError):
                await sandbox.write(name, "x")
        with pytest.raises(FileNotFoundError):
            await sandbox.read("nothing")
        await sandbox.write("long", b"12345")
        with pytest.raises(SandboxError, match="more than 4 bytes"):
            await sandbox.read("long", limit=4)
    assert (secret.read_text(), os.listdir(tmp_path)) == ("s", ["secret"])


def test_folders_take_the_place_of_links(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    (folder / "real").mkdir(parents=True)
    (outside / "deep").mkdir(parents=True)
    (folder / "link").symlink_to(outside)
    (folder / "real" / "file").write_text("x")
    make_beneath(folder, "link/deep/new")
    make_beneath(folder, "real/file/new")
    remove_beneath(folder, "real")
    remove_beneath(folder, "nothing/at/all")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        *("folder", "folder/link", "folder/link/deep", "folder/link/deep/new"),
        *("outside", "outside/deep"),
    ]
    (folder / "link" / "up").symlink_to(outside)
    copy_beneath(folder, "link/up", folder / "link" / "deep")
    with pytest.raises(SandboxError):
        copy_beneath(folder, "../outside/new", folder)
    copy_out_beneath(folder, "link", tmp_path / "out", 1000)
    assert (tmp_path / "out" / "up" / "new").is_dir()
    assert list(outside.rglob("*")) == [outside / "deep"]


@pytest.mark.linux
async def test_without_bubblewrap_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    local.check_local.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    try:
        with pytest.raises(SandboxError, match=r"needs the program bwrap\. Install bubblewrap .*--sandbox none"):
            await sh("true")
    finally:
        local.check_local.cache_clear()
    use_choice(SandboxChoice(kind="none"))
    async with Sandbox() as sandbox:
        assert sandbox.kind == "none"


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_folders_of_processes_that_live_stay() -> None:
    folder = folders.make_folder()
    assert folder.is_relative_to(tempfile.gettempdir())
    assert folder.parent not in folders.remove_abandoned()
    (folder / "closed").mkdir(mode=0)
    trees.remove(folder)
    assert not folder.exists()


@needs_sandbox
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("echo", "\0"), "'echo': Argument with a null byte"),
        (("echo", "\ud800"), "'echo': Invalid or incomplete multibyte or wide character"),
        (("echo", "x" * 131_072), "'echo': Argument list too long"),
        (("echo", *["x" * 100_000] * 11), "'echo': Argument list too long"),
    ],
    ids=["null", "surrogate", "one word", "all words"],
)
async def test_words_that_no_system_takes_are_an_outcome(words: tuple[str, ...], said: str) -> None:
    async with Sandbox() as sandbox:
        result = await sandbox.exec(*words)
        assert (result.code, result.output, result.ended) == (126, said, "exit")
        longest = await sandbox.exec("printf", "%s", "x" * 131_071, output=2**20)
        assert (longest.code, len(longest.output)) == (0, 131_071)


@needs_sandbox
async def test_a_sandbox_that_does_not_start_is_no_outcome_of_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    await sh("true")
    monkeypatch.setattr(local, "SYSTEM", ())  # there is no program to become another user with
    with pytest.raises(SandboxError, match=r"a sandbox did not start sh: .*No such file"):
        await sh("true")


@every
async def test_time_is_counted_from_the_beginning_of_a_program(kind: Kind) -> None:
    results = await asyncio.gather(*(sh("sleep 0.1; echo done", kind, 2.0) for _ in range(20)))
    assert {result.output for result in results} == {"done\n"}
