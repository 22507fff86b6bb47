"""SIGKILL of a run in every phase of its sandboxes: after the next start no process, no container and no folder of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.env.isolation import launcher
from agentrl.env.sandbox.spec import Kind
from tests.faults.report import Saw
from tests.faults.support import disturbed, until
from tests.sandboxes import IMAGE, builds, container_engine, has_image, image_of, needs_sandbox
from tests.unit.env.sandbox.test_left_over import command_lines, soon

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

MARK = f"3597.{os.getpid()}"  # seconds, which no other run of these tests has
ENV = """
import asyncio
from agentrl import AgentInstance, Sandbox, SandboxSpec, StepResult, Task

KIND, PHASE, IMAGE, SAID, MARK = {told}
SPEC = SandboxSpec(kind=KIND, image=IMAGE)
everyone = None


def say():
    with open(SAID, "a") as file:
        file.write(PHASE + "\\n")


class Boxed(AgentInstance):
    @classmethod
    def tasks(cls):
        return [Task(f"Say {{n}}.", label=n) for n in range(4)]

    async def step(self, state):
        global everyone
        everyone = everyone or asyncio.Barrier(4)
        if PHASE == "building":
            say()
        async with Sandbox(SPEC) as sandbox:
            if PHASE == "starting":
                say()
            if PHASE == "ending":
                await sandbox.exec("true")
                await everyone.wait()
                say()
                return StepResult(1.0, terminated=True)
            if PHASE == "scoring":
                await sandbox.exec("sh", "-c", f"setsid sleep {{MARK}} &")
                async with Sandbox(SPEC) as second:
                    say()
                    await second.exec("sleep", MARK, timeout_s=1000)
            say()
            await sandbox.exec("sh", "-c", f"setsid sleep {{MARK}} & sleep {{MARK}}", timeout_s=1000)
"""
NEXT = """
import asyncio, sys
from agentrl import Sandbox, SandboxSpec

async def main():
    async with Sandbox(SandboxSpec(kind=sys.argv[1], image=sys.argv[2])) as sandbox:
        (await sandbox.exec("true")).check()

asyncio.run(main())
"""
SIZES = ("--num-steps", "2", "--groups-per-step", "2", "--n-samples-per-prompt", "2", "--max-new-tokens", "4", "--no-save-model")
PHASES = ("starting", "running", "scoring", "ending")
CASES = [
    *(pytest.param("local", phase, "local", "command", marks=needs_sandbox) for phase in PHASES),
    pytest.param("local", "running", "local", "trainer", marks=needs_sandbox),
    *(("container", phase, "local", "trainer") for phase in ("building", *PHASES)),
    ("container", "running", "local", "command"),
    *(("container", "running", "ray", victim) for victim in ("command", "trainer")),
]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The folder for temporary files of the run; its name is short, as those of Ray's sockets must be."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def sleeping() -> int:
    return sum(line == f"sleep\0{MARK}\0".encode() for _, line in command_lines())


def files_in(folder: Path) -> list[Path]:
    """Return what is there besides PyTorch's cache."""
    return [path for path in folder.iterdir() if not path.name.startswith("torchinductor")]


def trainer_of(command: int) -> int:
    """Return the process that trains, a child of the one that was started, which stands guard."""
    return launcher.children(command)[0]


@pytest.mark.parametrize(("kind", "phase", "runtime", "victim"), CASES)
@pytest.mark.row(33, "SIGKILL of the {victim} while sandboxes of the kind {kind} are {phase} (--runtime {runtime})")
def test_nothing_is_left_of_a_run_that_is_killed(
    kind: Kind, phase: str, runtime: str, victim: str, temporary: Path, tmp_path: Path, saw: Saw
) -> None:
    engine = container_engine() if kind == "container" else None
    before = builds(engine) if engine else set()
    said, image = tmp_path / "said", IMAGE
    if phase == "building":
        (tmp_path / "box").mkdir()
        (tmp_path / "box" / "Containerfile").write_text(f"FROM {IMAGE}\nRUN setsid sleep {MARK} & sleep {MARK}\n")
        image = str(tmp_path / "box")
    (tmp_path / "env.py").write_text(ENV.format(told=repr((kind, phase, image, str(said), MARK))))
    places = ("--agent", str(tmp_path / "env.py"), "--run-dir", str(tmp_path / "run"), "--runtime", runtime)
    env = {"TMPDIR": str(temporary)}
    with disturbed(*places, *SIZES, "--engine", "transformers", "--skip-checks", "env", env=env) as process:
        until(process, said.exists, 300)
        if phase not in ("starting", "ending"):
            until(process, lambda: sleeping() > 0)
        os.kill(process.pid if victim == "command" else trainer_of(process.pid), signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, output
    again = [sys.executable, "-c", NEXT, kind, IMAGE]
    subprocess.run(again, env={**os.environ, **env}, check=True, timeout=200)
    marks = (f"\0{MARK}\0".encode(), str(temporary).encode())
    assert soon(lambda: not any(mark in line for _, line in command_lines() for mark in marks), 40.0)
    assert soon(lambda: not files_in(temporary), 40.0), files_in(temporary)
    if engine:
        listed = [*engine.program, "ps", "--all", "--format", "{{.Labels}}"]
        assert soon(lambda: str(temporary) not in subprocess.run(listed, capture_output=True, text=True, check=True).stdout, 40.0)
        assert soon(lambda: builds(engine) <= before)
        assert phase != "building" or not has_image(engine, image_of(tmp_path / "box"))
    saw("no process, container or folder after the next start")
