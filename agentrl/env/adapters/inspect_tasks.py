"""Tasks of Inspect (https://inspect.aisi.org.uk) as black-box agents: ``--agent inspect:file.py@TASK?option=value``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from agentrl.core.errors import EnvLoadError, EnvResultError
from agentrl.core.types import Task
from agentrl.env.adapters import inspect_program
from agentrl.env.adapters.command import CommandAgent
from agentrl.env.adapters.specs import FLAG, MAX_PROBLEM, class_name, split_spec
from agentrl.env.agent import StepResult
from agentrl.env.black_box import ModelEndpoint

PROGRAM = inspect_program.__file__
SAMPLE = "sample"
LIST_TIMEOUT_S = 300.0
OPTIONS = ("python", "sandbox", "score")


class InspectAgent(CommandAgent):
    """One sample, solved and scored by Inspect in a process of its own, because it evaluates one thing at a time in a process."""

    python: ClassVar[str] = sys.executable
    task: ClassVar[str] = ""  # JSON object that says which task, for the program
    spec: ClassVar[str] = ""  # what ``--agent`` said, for messages
    keeps_home = True  # caches of data sets are there
    makes_sandboxes = True

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """One task per sample."""
        with tempfile.TemporaryDirectory(prefix="agentrl-inspect-") as folder:
            out = Path(folder) / "samples.json"
            words = [cls.python, PROGRAM, "list", cls.task, str(out)]
            try:
                done = subprocess.run(words, capture_output=True, text=True, timeout=LIST_TIMEOUT_S, check=False)
            except subprocess.TimeoutExpired as error:
                problem = f"its samples could not be listed within {LIST_TIMEOUT_S:g} s"
                raise EnvLoadError(FLAG, cls.spec, problem, "Load the data set once beforehand.") from error
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                remedy = "It needs inspect-ai: pip install inspect-ai, or ?python=INTERPRETER of an environment that has it."
                raise EnvLoadError(FLAG, cls.spec, f"its samples could not be listed: {last[:MAX_PROBLEM]}", remedy)
            samples = json.loads(out.read_text(encoding="utf-8"))
        return [
            Task(sample["input"], label=sample["target"], id=str(sample["id"]), metadata={SAMPLE: json.dumps(sample["id"])})
            for sample in samples
        ]

    def _words(self, task: Task, llm: ModelEndpoint, work: Path) -> list[str]:
        return [self.python, PROGRAM, "run", self.task, str(task.metadata[SAMPLE])]

    async def _judge(self, task: Task, work: Path, output: str) -> StepResult:
        last = (output.strip().splitlines() or [""])[-1]
        try:
            found: dict[str, Any] = json.loads(last)
            return StepResult(found["reward"], info=found["info"], truncated=found["truncated"])
        except (ValueError, KeyError, TypeError) as error:
            raise EnvResultError(f"{self.spec}: Inspect ended without a score; it printed last: {last[:MAX_PROBLEM]!r}") from error


def load_inspect(spec: str) -> type[InspectAgent]:
    """Return the class for ``inspect:TASK[?option=value&...]``; options but `python`, `sandbox` and `score` are arguments of the task."""
    name, options = split_spec(spec)
    own = {option: str(options.pop(option, "")) for option in OPTIONS}
    file, at, wanted = name.partition("@")
    folder = ""
    if file.endswith(".py"):
        path = Path(file).expanduser()
        if not path.is_file():
            raise EnvLoadError(FLAG, spec, f"there is no file {file!r}", "Write inspect:file.py@TASK, or the name of an installed task.")
        folder, name = str(path.absolute().parent), f"{path.name}{at}{wanted}"
        spec = spec.replace(file, str(path.absolute()), 1)
    if not name:
        raise EnvLoadError(FLAG, spec, "names no task", "Write inspect:file.py@TASK, or the name of an installed task.")
    task = {"folder": folder, "task": name, "args": options, "sandbox": own["sandbox"], "score": own["score"]}
    body = {"task": json.dumps(task), "spec": spec, "agent_spec": spec, "__module__": __name__, "__doc__": f"Inspect's task {name}."}
    return type(
        class_name(wanted or Path(name).stem, "Inspect"), (InspectAgent,), body | ({"python": own["python"]} if own["python"] else {})
    )
