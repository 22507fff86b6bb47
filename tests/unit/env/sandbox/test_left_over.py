"""Sandboxes of a trainer that is ended in any phase, by any signal: no process, no container and no folder of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.env.sandbox import engine as engines
from agentrl.env.sandbox import folders, reaper
from agentrl.env.sandbox.spec import Kind
from tests.sandboxes import IMAGE, builds, container_engine, containers, has_image, image_of, needs_sandbox

MARK = f"3591.{os.getpid()}"  # seconds, which no other run of these tests has
TRAINER = f"""
import asyncio, sys
from agentrl import Sandbox, SandboxSpec
from agentrl.env.sandbox.folders import own_root
kind, phase, image = sys.argv[1:]
spec = SandboxSpec(kind=kind, image=image)
LONG = "setsid sleep {MARK} & sleep {MARK}"

def say(word):
    print(word, own_root(), flush=True)

async def one(phase):
    async with Sandbox(spec) as sandbox:
        if phase == "ending":
            await sandbox.exec("true")
            await everyone.wait()
            say(phase)
            return
        if phase == "scoring":
            await sandbox.exec("sh", "-c", "setsid sleep {MARK} &")
            await one("running")
        if phase == "starting":
            say(phase)
        await sandbox.exec("sh", "-c", LONG, timeout_s=1000)

async def main():
    global everyone
    number = 1 if phase in ("building", "running", "scoring") else 4
    everyone = asyncio.Barrier(number)
    if phase == "building":
        say(phase)
    running = asyncio.gather(*(one(phase) for _ in range(number)))
    if phase in ("running", "scoring"):
        say(phase)
    await running

asyncio.run(main())
"""
PHASES = ("starting", "running", "scoring", "ending")
LOCAL = [pytest.param("local", phase, marks=[needs_sandbox, *([] if phase == "running" else [pytest.mark.slow])]) for phase in PHASES]
CONTAINER = [pytest.param("container", phase, marks=pytest.mark.slow) for phase in ("building", *PHASES)]


def soon(condition: Callable[[], object], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def command_lines() -> list[tuple[int, bytes]]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.append((int(name), Path("/proc", name, "cmdline").read_bytes()))
        except OSError:
            continue
    return found


def left(root: Path) -> list[bytes]:
    """Command lines of processes that name the marked program, or the folder of the trainer."""
    return [line for _, line in command_lines() if f"\0{MARK}\0".encode() in line or str(root).encode() in line]


def sleeps() -> bool:
    return any(line == f"sleep\0{MARK}\0".encode() for _, line in command_lines())


def started(kind: Kind, phase: str, tmp_path: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a trainer; return it in a phase, with the folder of its sandboxes."""
    image = IMAGE
    if phase == "building":
        (tmp_path / "Containerfile").write_text(f"FROM {IMAGE}\nRUN setsid sleep {MARK} & sleep {MARK}\n")
        image = str(tmp_path)
    words = [sys.executable, "-c", TRAINER, kind, phase, image]
    trainer = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert trainer.stdout is not None
    said, root = trainer.stdout.readline().split()
    assert said == phase
    if phase not in ("starting", "ending"):
        assert soon(sleeps)
    elif phase == "starting" and kind == "container":
        assert soon(lambda: any(b"\0run\0" in line and root.encode() in line for _, line in command_lines()))
    return trainer, Path(root)


def ended(trainer: subprocess.Popen[str], number: signal.Signals) -> None:
    trainer.send_signal(number)
    trainer.wait(timeout=30)
    assert trainer.stdout is not None
    trainer.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize(("kind", "phase"), [*LOCAL, *CONTAINER])
def test_nothing_is_left_of_a_trainer_that_is_ended(kind: Kind, phase: str, number: signal.Signals, tmp_path: Path) -> None:
    engine = container_engine() if kind == "container" else None
    before = builds(engine) if engine else set()
    trainer, root = started(kind, phase, tmp_path)
    ended(trainer, number)
    if engine:  # the second process of the trainer removes all, without a next start
        assert soon(lambda: not root.exists() and not left(root), 40.0), left(root)
        assert containers(engine, root) == []
        assert soon(lambda: builds(engine) <= before)
        assert phase != "building" or not has_image(engine, image_of(tmp_path))
    else:
        assert soon(lambda: not left(root))
        folders.remove_abandoned()
        assert soon(lambda: not root.exists())  # another process may be at it


@pytest.mark.slow
def test_the_next_start_removes_containers_whose_owner_and_its_second_process_were_killed(tmp_path: Path) -> None:
    engine = container_engine()
    trainer, root = started("container", "running", tmp_path)
    second = next(pid for pid, line in command_lines() if b"reaper.py" in line and str(root).encode() in line)
    os.kill(second, signal.SIGKILL)
    ended(trainer, signal.SIGKILL)
    time.sleep(1.0)
    assert len(containers(engine, root)) == 1
    assert sleeps()
    folders.remove_abandoned()
    engines.remove_abandoned_containers(engine)
    assert containers(engine, root) == []
    assert not root.exists()
    assert soon(lambda: not left(root))


@pytest.mark.slow
def test_containers_of_owners_that_live_or_are_elsewhere_stay(tmp_path: Path) -> None:
    engine = container_engine()
    trainer, root = started("container", "running", tmp_path)
    elsewhere = f"{reaper.OWNER}=another-machine:{tempfile.gettempdir()}/{folders.PREFIX}gone"
    words = [*engine.program, "create", "--label", elsewhere, IMAGE, "true"]
    other = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    try:
        engines.remove_abandoned_containers(engine)
        assert len(containers(engine, root)) == 1
        assert other in subprocess.run([*engine.program, "ps", "--all", "--quiet", "--no-trunc"], capture_output=True, text=True).stdout
    finally:
        ended(trainer, signal.SIGTERM)
        subprocess.run([*engine.program, "rm", "--force", other], capture_output=True, check=True)
    assert soon(lambda: not root.exists())
