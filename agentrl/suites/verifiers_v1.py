"""The scheme ``verifiers:``, and task sets of verifiers 0.4 and later as black-box agents: ``verifiers:NAME?python=INTERPRETER``.

Their packages want other versions of clients than agentrl's environment has, so an episode runs in an interpreter of its own.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
from typing import Any

from agentrl.core.errors import EnvLoadError
from agentrl.env.black_box import BlackBoxAgent
from agentrl.suites import verifiers_program
from agentrl.suites.other_python import OtherPythonAgent
from agentrl.suites.scheme import FLAG, Scheme
from agentrl.suites.specs import class_name, import_suite, split_spec, take_count
from agentrl.suites.verifiers import LOADER, verifiers_agent

PYTHON = "python"


class TasksetAgent(OtherPythonAgent):
    """One episode of a task set: verifiers starts its agent, tools and runtime, and scores."""

    suite = "verifiers"
    package = "verifiers"
    program = verifiers_program.__file__


def load_verifiers(spec: str) -> type[BlackBoxAgent]:
    """Return the class for ``verifiers:NAME[?option=value&...]``, of version 0.4 or later if `python` is an option or if that is installed.

    Before 0.4, options are arguments of the environment's ``load_environment``.
    """
    name, options = split_spec(spec)
    if PYTHON in options:
        return load_taskset(spec)
    load = getattr(import_suite(spec, "verifiers", "verifiers"), LOADER, None)
    if load is None:
        return load_taskset(spec)
    return verifiers_agent(spec, name.rpartition("/")[2], functools.partial(load, name, **options), __name__)


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


VERIFIERS = Scheme(
    name="verifiers",
    load=load_verifiers,
    form="verifiers:NAME",
    about="[verifiers](https://github.com/PrimeIntellect-ai/verifiers) 0.1.9, and [task sets](#task-sets-of-verifiers-04) of 0.4: "
    "environments of Prime Intellect's hub ([below](#verifiers))",
    needs="`pip install 'agentrl[verifiers]'` and the environment's own package",
)
