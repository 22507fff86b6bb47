"""Task sets of verifiers 0.4 and later as black-box agents: ``--agent verifiers:NAME?python=INTERPRETER&option=value``.

Their packages want other versions of clients than agentrl's environment has, so an episode runs in an interpreter of its own.
"""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

from agentrl.core.errors import EnvLoadError
from agentrl.env.adapters import verifiers_program
from agentrl.env.adapters.other_python import OtherPythonAgent
from agentrl.env.adapters.specs import FLAG, class_name, split_spec, take_count

PYTHON = "python"


class TasksetAgent(OtherPythonAgent):
    """One episode of a task set: verifiers starts its agent, tools and runtime, and scores."""

    suite = "verifiers"
    package = "verifiers"
    program = verifiers_program.__file__


def load_taskset(spec: str) -> type[TasksetAgent]:
    """Return the class for ``verifiers:NAME?python=INTERPRETER[&option=value&...]``.

    Options are settings of the task set; ``env.`` before a name makes it one of the environment (``env.agent.harness.id=null``).
    """
    name, options = split_spec(spec)
    python = str(options.pop(PYTHON, sys.executable))
    if shutil.which(python) is None:
        raise EnvLoadError(FLAG, spec, f"there is no interpreter {python!r}", "Name the bin/python of an environment with verifiers.")
    if not name:
        raise EnvLoadError(FLAG, spec, "names no task set", "Write verifiers:NAME, the name of an installed package.")
    num_tasks = take_count(spec, options, "num_tasks")
    config: dict[str, Any] = {"taskset": {"id": name}}
    for option, value in options.items():
        _set(config, option.removeprefix("env.") if option.startswith("env.") else f"taskset.{option}", value)
    task = json.dumps({"env": config, "num_tasks": num_tasks})
    body = {"task": task, "python": python, "spec": spec, "agent_spec": spec, "__module__": __name__, "__doc__": f"The task set {name}."}
    return type(class_name(name.rpartition("/")[2], "Taskset"), (TasksetAgent,), body)


def _set(config: dict[str, Any], name: str, value: Any) -> None:
    """Set a value in nested dictionaries, under a name with dots."""
    *above, last = name.split(".")
    for part in above:
        config = config.setdefault(part, {})
    config[last] = value
