"""Sandboxes that are containers: images by name and from Containerfiles, what lasts between programs, files, users, networks, refusals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from agentrl.core.errors import SandboxError
from agentrl.env.sandbox import engine as engines
from agentrl.env.sandbox.container import Form
from agentrl.env.sandbox.engine import Engine
from agentrl.env.sandbox.images import content_hash, find_containerfile, is_path
from agentrl.env.sandbox.sandbox import Sandbox
from agentrl.env.sandbox.spec import ExecResult, Kind, SandboxChoice, SandboxSpec, use_choice
from agentrl.env.timing import Stopwatch, use_stopwatch
from tests.sandboxes import IMAGE, builds, container_engine, containers, has_image, image_of

slow = pytest.mark.slow
pytestmark = pytest.mark.anyio


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Podman or docker."""
    found = container_engine()
    yield found
    assert containers(found) == []


def spec(**values: object) -> SandboxSpec:
    return SandboxSpec(**{"kind": "container", "image": IMAGE, **values})  # type: ignore[arg-type]


@slow
async def test_changes_to_the_image_stay_until_the_end(engine: Engine) -> None:
    async with Sandbox(spec(root=True)) as sandbox:
        assert (
            await sandbox.exec("sh", "-c", "echo new > /etc/added; mkdir /logs; echo 1 > /logs/reward; id -u; echo $HOME")
        ).output == "0\n/root\n"
        await sandbox.exec("sh", "-c", "setsid sleep 60 & sleep 0.1")  # after which the container is started again
        assert (await sandbox.exec("cat", "/etc/added")).output == "new\n"
        assert await sandbox.read("/logs/reward") == b"1\n"
        await sandbox.write("/tests/in/test.sh", "echo tested")
        assert (await sandbox.exec("sh", "/tests/in/test.sh")).output == "tested\n"
        assert len(containers(engine)) == 1
    async with Sandbox(spec()) as sandbox:
        assert (await sandbox.exec("cat", "/etc/added")).code == 1


@slow
async def test_folders_go_in_and_out(engine: Engine, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "run.sh").write_text("echo ran")
    (source / "deep" / "run.sh").chmod(0o755)
    async with Sandbox(spec(root=True)) as sandbox:
        await sandbox.exec("sh", "-c", "mkdir -p /tests work; echo old > /tests/planted; echo old > work/planted")
        for number, name in enumerate(("/tests", "work")):
            await sandbox.copy_in(source, name)
            assert (await sandbox.exec("sh", "-c", f"ls {name}; {name}/deep/run.sh; ln -s /etc/passwd {name}/link")).output == "deep\nran\n"
            await sandbox.copy_out(name, tmp_path / f"out{number}")
            assert [str(path.relative_to(tmp_path / f"out{number}")) for path in sorted((tmp_path / f"out{number}").rglob("*"))] == [
                "deep",
                "deep/run.sh",
            ]
        with pytest.raises(FileNotFoundError):
            await sandbox.copy_out("/nothing", tmp_path / "none")


@slow
async def test_files_of_a_container_are_plain_and_of_limited_size(engine: Engine) -> None:
    async with Sandbox(spec()) as sandbox:
        await sandbox.exec("sh", "-c", "ln -s /etc/passwd /tmp/link; mkfifo /tmp/pipe; head -c 3000000 /dev/zero > /tmp/large")
        for name in ("/tmp/pipe", "/tmp"):
            with pytest.raises(SandboxError, match="no plain file"):
                await sandbox.read(name)
        with pytest.raises(SandboxError, match="more than 1000 bytes"):
            await sandbox.read("/tmp/large", limit=1000)
        with pytest.raises(FileNotFoundError):
            await sandbox.read("/tmp/nothing")
        assert len(await sandbox.read("/tmp/large")) == 3_000_000


@slow
async def test_programs_have_no_rights_and_no_network(engine: Engine) -> None:
    line = "id -u; grep CapEff /proc/self/status; ls /sys/class/net; touch /usr/x; cat /proc/1/environ >/dev/null && echo shell"
    async with Sandbox(spec()) as sandbox:
        output = (await sandbox.exec("sh", "-c", line)).output
    assert "Permission denied" in output
    assert output.split()[:4] == [output.split()[0], "CapEff:", "0000000000000000", "lo"]
    assert int(output.split()[0]) != 0


@pytest.fixture
def program() -> Iterator[Path]:
    """A program in the home of root."""
    with tempfile.TemporaryDirectory(dir="/root") as folder:
        path = Path(folder, "program")
        path.write_text("#!/bin/sh\nid -u; ls /root\n")
        path.chmod(0o755)
        path.parent.chmod(0o755)
        yield path


@slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the home of root is closed to others")
async def test_programs_in_the_home_of_root_can_be_run(engine: Engine, program: Path) -> None:
    async with Sandbox(spec(read=(str(program.parent),))) as sandbox:
        user, *seen = (await sandbox.exec(str(program))).output.split()
    assert user != "0"
    assert seen == [program.parent.name]


@pytest.mark.parametrize(
    ("user", "read", "opened"), [(7, "/root/bin", True), (7, "/opt", False), (7, "/root", False), (None, "/root/bin", False)]
)
def test_the_home_of_root_is_opened_where_others_need_what_is_in_it(user: int | None, read: str, opened: bool) -> None:
    group = None if user is None else (user, user)
    form = Form(image="image", folder=Path("/tmp/work"), spec=spec(), user=group, read=(read,), network=False)
    assert form.needs_home_of_root == opened


@slow
async def test_another_network_or_more_files_begin_a_new_container_with_the_same_folder(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("read")
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        connect = f"import socket; socket.create_connection(('127.0.0.1', {server.server_port}), 2)"
        async with Sandbox(spec()) as sandbox:
            assert (await sandbox.exec(sandbox.python, "-c", connect)).code == 1
            await sandbox.exec("sh", "-c", "echo kept > kept; echo lost > /tmp/lost")
            found = await sandbox.exec("cat", "kept", "/tmp/lost", str(tmp_path / "data"), read=[str(tmp_path / "data"), "/not/there"])
            assert found.output == "kept\ncat: /tmp/lost: No such file or directory\nread"
            assert (await sandbox.exec(sandbox.python, "-c", connect, network=True)).code == 0
            assert len(containers(engine)) == 1


@slow
async def test_a_program_that_the_system_ends_at_once_has_used_up_its_memory(engine: Engine) -> None:
    async with Sandbox(spec(memory_mib=64)) as sandbox:
        for _ in range(2):  # in no race with the looks at its memory
            result = await sandbox.exec(sandbox.python, "-S", "-c", "x = b'1' * 200 * 2**20")
            assert (result.ended, result.code) == ("memory", -9)
        assert (await sandbox.exec("true")) == ExecResult(code=0, output="")


@slow
async def test_secrets_are_not_on_command_lines(engine: Engine) -> None:
    async with Sandbox(spec()) as sandbox:
        running = asyncio.create_task(
            sandbox.exec("sh", "-c", "sleep 1; echo $API_KEY $MODE", env={"API_KEY": "se cret 3571", "MODE": "fast 3572"})
        )
        lines = b""
        while not running.done():
            lines += b"".join(_command_lines())
            await asyncio.sleep(0.05)
        assert (await running).output == "se cret 3571 fast 3572\n"
    assert b"3572" in lines
    assert b"3571" not in lines


def _command_lines() -> Iterator[bytes]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            yield Path("/proc", name, "cmdline").read_bytes()
        except OSError:
            continue


CONTAINERFILE = f"""
FROM {IMAGE}
COPY notes.txt /notes.txt
RUN wc -c < /notes.txt > /counted && date +%N > /built
ENV PLACE=image
"""


@slow
async def test_an_image_is_built_once_and_again_when_its_files_change(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "Containerfile").write_text(CONTAINERFILE)
    (tmp_path / "notes.txt").write_text("12345")

    names = set()

    async def built() -> list[str]:
        names.add(image_of(tmp_path))
        watch = Stopwatch()
        use_stopwatch(watch)
        async with Sandbox(spec(image=str(tmp_path))) as sandbox:
            result = await sandbox.exec("sh", "-c", "cat /counted /built; echo $PLACE")
        return [*result.output.split(), str(sum(span.name == "tool:sandbox build" for span in watch.take()))]

    first, again = await asyncio.gather(built(), built())
    assert first[:3] == again[:3] == ["5", first[1], "image"]
    assert int(first[3]) + int(again[3]) == 1
    (tmp_path / "notes.txt").write_text("123456")
    changed = await built()
    assert (changed[0], changed[1] != first[1], changed[3]) == ("6", True, "1")
    (tmp_path / "Containerfile").write_text(f"FROM {IMAGE}\nRUN echo told; exit 7\n")
    with pytest.raises(SandboxError, match=r"(?s)Containerfile cannot be built: .*7"):
        await built()
    assert [has_image(engine, name) for name in sorted(names)].count(True) == 2
    for name in names:
        await engine.call("rmi", "--force", name)


@slow
async def test_a_build_that_takes_too_long_is_ended_with_all_that_it_made(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN setsid sleep 3574 & sleep 3575\n")
    begin, before = time.monotonic(), builds(engine)
    with pytest.raises(SandboxError, match="was not built within 4 s"):
        async with Sandbox(spec(image=str(tmp_path), build_timeout_s=4.0)):
            pass
    assert time.monotonic() - begin < 20
    assert not [line for line in _command_lines() if b"sleep\x003574" in line or b"sleep\x003575" in line]
    assert not has_image(engine, image_of(tmp_path))
    assert builds(engine) <= before


@slow
async def test_an_image_that_is_not_there_is_named(engine: Engine) -> None:
    with pytest.raises(SandboxError, match=r"there is no image 'localhost/agentrl-tests:nothing' here, and .* cannot pull it"):
        async with Sandbox(spec(image="localhost/agentrl-tests:nothing")):
            pass


@slow
async def test_labels_tell_owner_and_run(engine: Engine) -> None:
    use_choice(SandboxChoice(kind="container", image=IMAGE, run="runs/one"))
    async with Sandbox() as sandbox:
        await sandbox.exec("true")
        (name,) = containers(engine, sandbox.folder.parent)
        assert (await engine.call("inspect", "--format", '{{index .Config.Labels "agentrl.run"}}', name)).text == "runs/one"


def test_names_and_paths_of_images_are_told_apart(tmp_path: Path) -> None:
    assert [is_path(name) for name in ("debian", "ghcr.io/a/b:1", "./box", "/box/Containerfile", "..")] == [False, False, True, True, True]
    with pytest.raises(SandboxError, match="there is no Containerfile or Dockerfile at"):
        find_containerfile(str(tmp_path))
    with pytest.raises(SandboxError, match="there is no file at"):
        find_containerfile(str(tmp_path / "nothing"))


def test_a_hash_is_of_content_rights_and_links(tmp_path: Path) -> None:
    file = tmp_path / "Containerfile"
    hashes = set()
    lines = (
        "echo FROM a > Containerfile",
        "echo FROM b > Containerfile",
        "mkdir deep",
        "echo x > deep/a",
        "chmod 700 deep/a",
        "ln -s a link",
    )
    for line in (*lines, "ln -sf b link"):
        subprocess.run(line, shell=True, cwd=tmp_path, check=True)
        hashes.add(content_hash(file))
        assert content_hash(find_containerfile(str(tmp_path))) in hashes
    assert len(hashes) == len(lines) + 1


def test_the_end_of_a_call_is_seen_under_uvloop_although_what_it_started_goes_on(tmp_path: Path) -> None:
    uvloop = pytest.importorskip("uvloop")
    (tmp_path / "engine").write_text(f"sleep 20 & echo $! > {tmp_path}/pid; echo told; echo why >&2; exit 3")
    begin = time.monotonic()
    answer = uvloop.run(Engine(("sh",)).call(str(tmp_path / "engine")))
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert time.monotonic() - begin < 15
    assert (answer.code, answer.text, answer.error) == (3, "told", "why\n")


async def test_a_call_that_says_too_much_is_ended() -> None:
    much = await Engine(("yes",)).call("y", limit=1000)
    assert (much.code, much.output[:4]) == (0, b"y\ny\n")


@slow
@pytest.mark.parametrize("kind", ["local", "container"])
def test_sandboxes_work_under_uvloop(kind: Kind) -> None:
    uvloop = pytest.importorskip("uvloop")
    container_engine()

    async def use() -> tuple[str, str]:
        async with Sandbox(SandboxSpec(kind=kind, image=IMAGE)) as sandbox:
            first = await sandbox.exec("sh", "-c", "sleep 3583 & echo one")
            second = await sandbox.exec("cat", stdin=b"two", timeout_s=20.0)
        return first.output, second.output

    assert uvloop.run(asyncio.wait_for(use(), 60)) == ("one\n", "two")


async def test_without_podman_and_docker_the_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    engines._found.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    try:
        with pytest.raises(SandboxError, match=r"needs podman or docker\. Install podman .*docker\.io.*--sandbox local"):
            async with Sandbox(spec()):
                pass
    finally:
        engines._found.cache_clear()


@pytest.mark.parametrize(
    ("told", "user", "missing"),
    [
        ("v2 [cpu memory pids]", 1000, ""),
        ("v1 []", 1000, r"\(v1\) for memory and pids here"),
        ("v2 [cpu pids]", 1000, r"\(v2\) for memory here"),
        ("v1 []", 0, ""),
    ],
)
def test_podman_without_root_that_would_ignore_limits_is_refused(
    told: str, user: int, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    podman = tmp_path / "podman"
    podman.write_text(f"#!/bin/sh\n[ $1 = info ] && echo '{told}'\nexit 0\n")
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    engines._found.cache_clear()
    try:
        if missing:
            with pytest.raises(SandboxError, match=f"podman without root has no control groups {missing}.*Delegate .*--sandbox local"):
                engines.find_engine()
        else:
            assert engines.find_engine().program == (str(podman),)
    finally:
        engines._found.cache_clear()
