"""Task folders of Harbor, played by Harbor itself: ``--agent harbor:FOLDER?python=INTERPRETER&agent=NAME``.

Its package needs Python 3.12, so a trial runs in an interpreter of its own.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from agentrl.core.errors import EnvLoadError
from agentrl.core.sandboxes import CONTAINERS, CONTAINERS_REMEDY
from agentrl.core.types import Task
from agentrl.env.agent import StepResult
from agentrl.env.black_box import ModelEndpoint
from agentrl.env.sandbox.engine import Engine, owner_label
from agentrl.env.sandbox.reaper import OWNER, TRIAL
from agentrl.env.sandbox.spec import SandboxSpec
from agentrl.env.sandbox.watched import begin_watch, end_watch
from agentrl.suites.harbor import program as harbor_program
from agentrl.suites.harbor.tasks import INSTRUCTION
from agentrl.suites.harbor.trial import judged
from agentrl.suites.other_python import OtherPythonAgent
from agentrl.suites.scheme import FLAG

PYTHON, AGENT, ENVIRONMENT = "python", "agent", "environment"
TERMINUS = "terminus-2"
"""Harbor's own agent, which works from its process."""
ROOM_MIB, PLENTY = 2**16, 4096
"""Sizes of files, and numbers of files and of processes, for Harbor and the builds of images that it starts."""
NOWHERE = ModelEndpoint(root="http://127.0.0.1:1", api_key="none")
"""Address for agents that ask no model."""


class HarborOwnAgent(OtherPythonAgent):
    """One trial, which Harbor starts, judges and ends.

    Attributes:
        folders: Folders of the tasks.
        rewarded: Name of the reward, for tests that write several.
        agent: Name of an agent of Harbor, or ``file.py:Class``.
        environment: Program that holds the containers.
    """

    suite = "Harbor"
    package = "harbor"
    program = harbor_program.__file__
    folders: ClassVar[tuple[str, ...]] = ()
    rewarded: ClassVar[str] = ""
    agent: str = TERMINUS
    environment: ClassVar[str] = ""

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """One task per folder; the prompt is its instruction, or for a task of several steps its name."""
        files = [Path(folder) / INSTRUCTION for folder in cls.folders]
        told = [file.read_text(encoding="utf-8").strip() if file.is_file() else file.parent.name for file in files]
        return [Task(text, id=file.parent.name, metadata={"folder": str(file.parent)}) for text, file in zip(told, files, strict=True)]

    @classmethod
    async def try_solution(cls, task: Task, *, solved: bool) -> float:
        """Return the reward of the task's own solution, or of an agent that does nothing."""
        trial = cls()
        trial.agent = "oracle" if solved else "nop"
        return (await trial.run(task, NOWHERE)).reward

    async def run(self, task: Task, llm: ModelEndpoint) -> StepResult:
        """Run the trial, and remove its container if Harbor did not; `EnvError` if it fails."""
        engine = Engine((str(shutil.which(self.environment)),))
        self._labels = {OWNER: await asyncio.to_thread(owner_label), TRIAL: secrets.token_hex(8)}
        # Before Harbor makes the container, which is then removed also if this process is killed.
        await asyncio.to_thread(begin_watch, engine)
        try:
            return await super().run(task, llm)
        finally:
            # Shielded, so that the container is removed also if the episode is cancelled again.
            await asyncio.shield(asyncio.ensure_future(self._remove(engine)))

    async def _remove(self, engine: Engine) -> None:
        listed = await engine.call("ps", "--all", "--quiet", "--filter", f"label={TRIAL}={self._labels[TRIAL]}")
        if found := listed.text.split():
            await engine.call("rm", "--force", "--volumes", *found)
        await asyncio.to_thread(end_watch)

    def _words(self, task: Task, llm: ModelEndpoint, work: Path) -> list[str]:
        told = {"agent": self.agent, "environment": self.environment, "labels": self._labels}
        return [self.python, self.program, "run", json.dumps(told), str(task.metadata["folder"])]

    def _outcome(self, task: Task, found: dict[str, Any]) -> StepResult:
        return judged(found["rewards"], self.rewarded, task.id, truncated=found["truncated"])

    def _spec(self) -> SandboxSpec:
        form = super()._spec()
        return replace(
            form,
            memory_mib=max(form.memory_mib, ROOM_MIB // 8),
            cpu_s=max(form.cpu_s, 86_400.0),
            processes=max(form.processes, PLENTY),
            open_files=max(form.open_files, PLENTY),
            file_mib=ROOM_MIB,
            disk_mib=ROOM_MIB,
        )


def own_members(spec: str, options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of Harbor itself, and return them as members of a `HarborOwnAgent`; `EnvLoadError` if one is out of range."""
    python, agent = str(options.pop(PYTHON)), str(options.pop(AGENT, TERMINUS))
    if shutil.which(python) is None:
        raise EnvLoadError(FLAG, spec, f"there is no interpreter {python!r}", "Name the bin/python of an environment with harbor.")
    file, found, cls = agent.partition(".py:")
    if found:
        path = Path(f"{file}.py").expanduser().absolute()
        if not path.is_file():
            raise EnvLoadError(
                FLAG, spec, f"there is no file {str(path)!r}", "Write agent=file.py:Class, or the name of an agent of Harbor."
            )
        agent = f"{path}:{cls}"
    wanted = str(options.pop(ENVIRONMENT, ""))
    if wanted and wanted not in CONTAINERS:
        raise EnvLoadError(FLAG, spec, f"environment = {wanted!r} is unknown", f"Choose {' or '.join(CONTAINERS)}.")
    environment = next((name for name in CONTAINERS if wanted in ("", name) and shutil.which(name)), None)
    if environment is None:
        raise EnvLoadError(FLAG, spec, f"there is no {wanted or ' or '.join(CONTAINERS)}", f"{CONTAINERS_REMEDY}.")
    return {"python": python, "agent": agent, "environment": environment}
