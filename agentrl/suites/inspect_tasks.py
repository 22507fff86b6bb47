"""Tasks of Inspect (https://inspect.aisi.org.uk) as black-box agents: ``--agent inspect:file.py@TASK?option=value``."""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.core.errors import EnvLoadError
from agentrl.suites import inspect_program
from agentrl.suites.other_python import OtherPythonAgent
from agentrl.suites.scheme import FLAG, Scheme
from agentrl.suites.specs import class_name, split_spec

OPTIONS = ("python", "sandbox", "score")


class InspectAgent(OtherPythonAgent):
    """One sample, solved and scored by Inspect in a process of its own, because it evaluates one thing at a time in a process."""

    suite = "Inspect"
    package = "inspect-ai"
    program = inspect_program.__file__


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
        # Other processes of the run may have another current directory.
        spec = spec.replace(file, str(path.absolute()), 1)
    if not name:
        raise EnvLoadError(FLAG, spec, "names no task", "Write inspect:file.py@TASK, or the name of an installed task.")
    package, slash, _ = name.partition("/")
    packages = f"inspect-ai {package.replace('_', '-')}" if slash and not folder else "inspect-ai"
    task = {"folder": folder, "task": name, "args": options, "sandbox": own["sandbox"], "score": own["score"]}
    body = {
        "task": json.dumps(task),
        "package": packages,
        "spec": spec,
        "agent_spec": spec,
        "__module__": __name__,
        "__doc__": f"Inspect's task {name}.",
    }
    return type(
        class_name(wanted or Path(name).stem, "Inspect"), (InspectAgent,), body | ({"python": own["python"]} if own["python"] else {})
    )


INSPECT = Scheme(
    name="inspect",
    load=load_inspect,
    form="inspect:TASK",
    about="[Inspect](https://inspect.aisi.org.uk): evaluations, as training environments ([below](#inspect))",
    needs="`pip install inspect-ai`, here or in another environment",
)
