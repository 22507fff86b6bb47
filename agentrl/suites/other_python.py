"""Suites that run in an interpreter of their own: one episode is one process, which prints its outcome as the last line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from agentrl.core.errors import EnvLoadError, EnvResultError
from agentrl.core.files import scratch_directory
from agentrl.core.types import Task
from agentrl.env.agent import StepResult
from agentrl.env.black_box import ModelEndpoint
from agentrl.env.sandbox.spec import current_choice
from agentrl.suites.command import CommandAgent
from agentrl.suites.scheme import FLAG
from agentrl.suites.specs import MAX_PROBLEM

SAMPLE = "sample"
LIST_TIMEOUT_S = 300.0


class OtherPythonAgent(CommandAgent):
    """One sample, solved and scored by a suite in a process of its own.

    Attributes:
        suite: Name of the suite, for messages.
        package: Package that it needs.
        program: File that ``python`` runs with ``list TASK OUT`` or ``run TASK ID SANDBOX``.
        python: Interpreter.
        task: JSON object that tells the program which samples.
        start_s: Seconds that the listing of the samples took in this process, most of which are the imports that each episode begins with;
            ``agentrl check`` leaves an episode so much more time.
        spec: What ``--agent`` said, for messages.
    """

    suite: ClassVar[str] = ""
    package: ClassVar[str] = ""
    program: ClassVar[str] = ""
    python: ClassVar[str] = sys.executable
    task: ClassVar[str] = ""
    spec: ClassVar[str] = ""
    start_s: ClassVar[float] = 0.0
    keeps_home = True  # caches of data sets are there
    makes_sandboxes = True

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """One task per sample."""
        with scratch_directory() as folder:
            out = folder / "samples.json"
            words = [cls.python, cls.program, "list", cls.task, str(out)]
            begun_s = time.monotonic()
            try:
                done = subprocess.run(words, capture_output=True, text=True, timeout=LIST_TIMEOUT_S, check=False)
            except subprocess.TimeoutExpired as error:
                problem = f"its samples could not be listed within {LIST_TIMEOUT_S:g} s"
                raise EnvLoadError(FLAG, cls.spec, problem, "Load the data set once beforehand.") from error
            except OSError as error:
                raise EnvLoadError(
                    FLAG, cls.spec, f"{cls.python} cannot be run: {error.strerror}", "Name another with ?python=."
                ) from error
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1][:MAX_PROBLEM]
                # A program may write its whole error in the place of the samples.
                problem = out.read_text(encoding="utf-8") if out.is_file() else last
                remedy = f"It needs {cls.package}: pip install {cls.package}, or ?python=INTERPRETER of an environment that has it."
                raise EnvLoadError(FLAG, cls.spec, f"its samples could not be listed: {problem}", remedy)
            cls.start_s = time.monotonic() - begun_s
            samples = json.loads(out.read_text(encoding="utf-8"))
        return [
            Task(sample["input"], label=sample["target"], id=str(sample["id"]), metadata={SAMPLE: json.dumps(sample["id"])})
            for sample in samples
        ]

    def _words(self, task: Task, llm: ModelEndpoint, work: Path) -> list[str]:
        return [self.python, self.program, "run", self.task, str(task.metadata[SAMPLE]), current_choice().kind]

    async def _judge(self, task: Task, work: Path, output: str) -> StepResult:
        last = (output.strip().splitlines() or [""])[-1]
        try:
            return self._outcome(task, json.loads(last))
        except (ValueError, KeyError, TypeError) as error:
            raise EnvResultError(f"{self.spec}: {self.suite} ended without a score; it printed last: {last[:MAX_PROBLEM]!r}") from error

    def _outcome(self, task: Task, found: dict[str, Any]) -> StepResult:
        return StepResult(found["reward"], info=found["info"], truncated=found["truncated"])
