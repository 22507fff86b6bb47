"""One trial of a task folder in containers: commands of an agent or its program, the task's own solution, and its tests."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from agentrl.core.errors import EnvError, EnvResultError
from agentrl.core.types import Task
from agentrl.env.agent import StepResult
from agentrl.env.black_box import ModelEndpoint
from agentrl.env.sandbox.engine import find_engine
from agentrl.env.sandbox.folders import own_root
from agentrl.env.sandbox.images import ready_image
from agentrl.env.sandbox.sandbox import Sandbox
from agentrl.env.sandbox.spec import ExecResult, SandboxSpec
from agentrl.suites.command import as_only_address
from agentrl.suites.harbor.containers import SOLUTION, Box, ContainerTask
from agentrl.suites.harbor.tasks import REWARDS, TEST, TESTS, VERIFIER, read_rewards, resolved
from agentrl.suites.harness import InstalledHarness

ARTIFACTS = "/logs/artifacts"
OUTPUT = 2**20
"""Bytes of the output of a program that are kept, its last."""
START = 'chmod +x "$1" && exec "$1"'
FRESH = 'rm -rf "$1" && mkdir -p "$1" /logs/agent /logs/artifacts'
KIND = 'if [ -d "$1" ]; then echo folder; elif [ -f "$1" ]; then echo file; fi'


class Trial:
    """The containers of one episode; `open` comes first and `close` last, as ``async with`` has it.

    Args:
        task: The task.
        network: True: tasks that ask for the network have it.
        installed: Program for which the agent's container has room, and whose files are in it to be read.
    """

    def __init__(self, task: ContainerTask, *, network: bool = False, installed: InstalledHarness | None = None) -> None:
        self._task, self._network, self._installed = task, network, installed
        self._stack = AsyncExitStack()
        self._sandbox: Sandbox
        self._workdir = ""

    async def __aenter__(self) -> Trial:
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def open(self) -> None:
        """Start the agent's container; `SandboxError` if it does not start."""
        form = self._task.box.spec(network=self._network)
        if self._installed is not None:
            form = replace(self._installed.roomy(form), read=self._installed.places)
        self._sandbox, self._workdir = await self._started(self._task.box, form)

    async def close(self) -> None:
        """Remove all containers."""
        await self._stack.aclose()

    async def act(self, task: Task, llm: ModelEndpoint, passed: Mapping[str, str]) -> ExecResult:
        """Run the installed program on the task to its end, for as long as the task allows.

        Args:
            task: The task, for what the program is told.
            llm: The endpoint, the only address that it reaches unless the container has the network.
            passed: Environment variables besides those of the task and of the program.

        Raises:
            SandboxError: If it used up memory or disk.
        """
        assert self._installed is not None
        sandbox, home, network = self._sandbox, self._sandbox.folder / "home", self._sandbox.spec.network
        home.mkdir(exist_ok=True)
        llm, reached = (llm, True) if network else as_only_address(llm)
        setup = self._installed.started(task, llm, Path(self._workdir), home)
        for name, text in setup.files.items():
            await sandbox.write(f"home/{name}", text)
        env = {**self._task.box.env, **passed, **setup.variables}
        limit = self._task.agent_timeout_s or math.inf
        done = await sandbox.exec(*setup.words, env=env, cwd=self._workdir, timeout_s=limit, network=reached, output=OUTPUT, keep="last")
        return done.check()

    async def run(self, command: str, timeout_s: float) -> ExecResult:
        """Run a command of the agent with bash; `SandboxError` if it used up memory or disk."""
        words, env = ("bash", "-c", command), self._task.box.env
        done = await self._sandbox.exec(*words, env=env, cwd=self._workdir, timeout_s=timeout_s, output=OUTPUT, keep="last")
        return done.check()

    async def solve(self) -> None:
        """Run the task's own solution; `EnvError` if there is none."""
        task = self._task
        if not (task.folder / SOLUTION).is_file():
            raise EnvError(f"{task.folder.name} has no {SOLUTION}")
        await self._sandbox.copy_in(task.folder / "solution", "/solution")
        env = {**task.box.env, "DEBIAN_FRONTEND": "noninteractive", **resolved(task.solution_env, os.environ)}
        await self._script(self._sandbox, f"/{SOLUTION}", env, self._workdir, task.agent_timeout_s or math.inf)

    async def verify(self) -> dict[str, float]:
        """Run the tests, in the agent's container or in one of their own, and return the rewards by name.

        Raises:
            EnvError: If they do not end in time.
            EnvResultError: If they write no reward.
        """
        task, sandbox, workdir = self._task, self._sandbox, self._workdir
        if task.verifier is not None:
            with tempfile.TemporaryDirectory(dir=own_root()) as folder:
                found = await self._collected(Path(folder))
                await self.close()  # the agent's processes and its container are gone before the tests are there
                sandbox, workdir = await self._started(task.verifier, task.verifier.spec(network=self._network))
                for source, copy in found.items():
                    await sandbox.copy_in(copy, source)
        if task.verifier is None or not task.has_tests:
            await sandbox.copy_in(task.folder / "tests", TESTS)
        # The agent may have written a reward there.
        (await sandbox.exec("sh", "-c", FRESH, "sh", VERIFIER)).check()
        env = {**(task.verifier or task.box).env, **resolved(task.verifier_env, os.environ)}
        done = await self._script(sandbox, f"/{TEST}", env, workdir, task.verifier_timeout_s)
        if done.ended == "timeout":
            raise EnvError(f"{task.folder.name}/{TEST} did not end within {task.verifier_timeout_s:g} s ([verifier] timeout_sec)")
        files = {}
        for name in REWARDS:
            with contextlib.suppress(FileNotFoundError):
                files[name] = (await sandbox.read(f"{VERIFIER}/{name}")).decode(errors="replace")
        return read_rewards(files, done.output)

    async def _started(self, box: Box, form: SandboxSpec) -> tuple[Sandbox, str]:
        """Return an open sandbox and its working folder."""
        sandbox = await self._stack.enter_async_context(Sandbox(form))
        workdir = box.workdir or await image_workdir(box)
        (await sandbox.exec("mkdir", "-p", workdir, "/logs/agent", ARTIFACTS)).check()
        return sandbox, workdir

    async def _script(self, sandbox: Sandbox, name: str, env: dict[str, str], workdir: str, timeout_s: float) -> ExecResult:
        words = ("sh", "-c", START, "sh", name)
        return (await sandbox.exec(*words, env=env, cwd=workdir, timeout_s=timeout_s, output=OUTPUT, keep="last")).check()

    async def _collected(self, folder: Path) -> dict[str, Path]:
        """Copy the artifacts out of the agent's container, as far as they are there, and return them by their names in it."""
        found: dict[str, Path] = {}
        for number, source in enumerate((ARTIFACTS, *self._task.artifacts)):
            copy = folder / str(number)
            kind = (await self._sandbox.exec("sh", "-c", KIND, "sh", source)).output.strip()
            if kind == "folder":
                await self._sandbox.copy_out(source, copy)
            elif kind == "file":
                copy.write_bytes(await self._sandbox.read(source))
            else:
                continue
            found[source] = copy
        return found


async def image_workdir(box: Box) -> str:
    """Return the working folder that an image names, after building it if it is not there."""
    engine = find_engine()
    name = await ready_image(engine, box.image, box.build_timeout_s)
    answer = await engine.call("image", "inspect", "--format", "{{.Config.WorkingDir}}", name)
    return answer.check(f"the image {name} cannot be looked at").text or "/"


def chosen_reward(rewards: dict[str, float], wanted: str, name: str) -> str:
    """Return the name of the reward that is trained on: the one that is `wanted`, else ``reward`` or the only one."""
    chosen = wanted or ("reward" if "reward" in rewards or len(rewards) > 1 else next(iter(rewards)))
    if chosen not in rewards:
        raise EnvResultError(f"the rewards of {name} are {', '.join(rewards)}; name the one to train on: harbor:FOLDER?reward=NAME")
    return chosen


def judged(rewards: dict[str, float], wanted: str, name: str, *, truncated: bool = False) -> StepResult:
    """Return the outcome of a trial: its reward, as `chosen_reward` says, and the other rewards as figures."""
    chosen = chosen_reward(rewards, wanted, name)
    return StepResult(rewards[chosen], info={other: value for other, value in rewards.items() if other != chosen}, truncated=truncated)
