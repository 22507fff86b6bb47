"""Manifest of inputs: what a run reads again when it is resumed, by fingerprints, and whether it is still what it was."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from agentrl.core.errors import ConfigError
from agentrl.core.fingerprints import ACCEPT, fingerprint_of, fingerprints_of
from agentrl.core.plugins import KEPT, PACKAGE
from agentrl.env.known_tasks import KnownTasks, known_tasks
from agentrl.env.tasks import TaskSource
from agentrl.suites.load import split_file

WEIGHTS, TOKENIZER = ("*.safetensors", "*.bin"), ("tokenizer*", "vocab*", "merges.txt", "*.model", "special_tokens_map.json")
TEMPLATE, SHAPE = ("chat_template*",), ("config.json", "adapter_config.json", "*.py")
PARTS = {"configuration": SHAPE, "weights": WEIGHTS, "tokenizer": TOKENIZER, "chat template": TEMPLATE}
"""Parts of a model's directory, with patterns of their files."""
INSTALLED = (Path(sys.prefix), Path(sys.base_prefix), PACKAGE)
"""Folders whose modules are not the user's own."""


@dataclass(frozen=True, kw_only=True)
class InputPlan:
    """Places of what a run reads besides its tasks: the environment, each model by the flag that names it, and a file of a template."""

    agent: str
    models: Mapping[str, str]
    chat_template: str = ""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Inputs of a run.

    Attributes:
        tasks: Tasks to train on, and those held out of them.
        questions: Tasks that the run is evaluated on; `None` if it is not, or on tasks held out.
        files: Fingerprints of files by what they are, ``model: weights``, and then by name. What is not on this machine is not there.
        code: Text of each file of the user's own, by its name in the folder of the environment.
    """

    tasks: KnownTasks
    questions: KnownTasks | None = None
    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    code: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        questions = None if self.questions is None else self.questions.to_json()
        return {"tasks": self.tasks.to_json(), "questions": questions, "files": self.files, "code": self.code}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Inputs:
        """The inverse of `to_json`."""
        questions = data["questions"] and KnownTasks.from_json(data["questions"])
        return cls(tasks=KnownTasks.from_json(data["tasks"]), questions=questions, files=data["files"], code=data["code"])


def read_inputs(plan: InputPlan, tasks: TaskSource, questions: KnownTasks | None, demonstrations: str = "") -> Inputs:
    """Return the inputs of a run as they are now; the environment has been loaded, and so what it imports from its folder.

    Args:
        plan: Their places.
        tasks: The tasks to train on.
        questions: Those that it is evaluated on.
        demonstrations: Hash of the rows of ``--sft-data``; empty without any.
    """
    files = read_files(plan) | ({"--sft-data": {"rows": demonstrations}} if demonstrations else {})
    return Inputs(tasks=tasks.known, questions=questions, files=files, code=read_code(plan.agent))


def read_files(plan: InputPlan) -> dict[str, Mapping[str, str]]:
    """Return the fingerprints of models and of a template, as `Inputs.files` has them."""
    files: dict[str, Mapping[str, str]] = {}
    for name, place in plan.models.items():
        folder = Path(place).expanduser()
        for part, patterns in PARTS.items() if folder.is_dir() else ():
            if found := fingerprints_of(folder, patterns):
                files[f"{name}: {part}"] = found
    template = Path(plan.chat_template)
    if template.is_file():
        files["--chat-template"] = {template.name: fingerprint_of(template)}
    return files


def read_code(agent: str) -> dict[str, str]:
    """Return the text of the environment's file, and of the modules that it has imported from its folder, by their names there."""
    file, _ = split_file(agent)
    if file is None or not file.is_file():
        return {}
    folder = file.resolve().parent
    loaded = {Path(origin) for module in [*sys.modules.values()] if (origin := getattr(module, "__file__", None))}
    below = {path for path in loaded if path.suffix == ".py" and folder in path.parents and path.is_file()}
    own = {file.resolve(), *(path for path in below if not any(place in path.parents for place in INSTALLED))}
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8", errors="replace") for path in sorted(own)}


def changed_files(before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return which files are not what they were, in words; what is not on this machine is not compared."""
    changes = []
    for what, found in now.items():
        old = before.get(what, found)
        if names := sorted(name for name in old.keys() | found.keys() if old.get(name) != found.get(name)):
            changes.append(f"{what} ({', '.join(names)})")
    return changes


GO_ON = f"Restore them, or go on with those that are there now: add {ACCEPT}."

Files: TypeAlias = Mapping[str, Mapping[str, str]]
"""Fingerprints by file, by what they belong to."""


def refuse_changed(before: Files, now: Files, run: str, *, flag: str = "--resume", remedy: str = GO_ON) -> None:
    """Refuse to go on with other models, tokenizers or templates; `flag` has named the run.

    Raises:
        ConfigError: If there are such.
    """
    if changed := changed_files(before, now):
        raise ConfigError(flag, run, f"reads other files than the run began with: {', '.join(changed)}", remedy)


def changed_code(before: Inputs, now: Inputs) -> dict[str, str]:
    """Return what of the user's code is not what it was: for each file how many lines came and went."""
    changes = {}
    for name in before.code.keys() | now.code.keys():
        old, new = before.code.get(name, ""), now.code.get(name, "")
        if old != new:
            lines = list(difflib.ndiff(old.splitlines(), new.splitlines()))
            changes[name] = f"+{sum(line.startswith('+ ') for line in lines)} -{sum(line.startswith('- ') for line in lines)}"
    return dict(sorted(changes.items()))


def shown_changes(before: Inputs, now: Inputs) -> str:
    """Return what of the user's code is not what it was, for people; "" if nothing."""
    return ", ".join(f"{name} ({lines} lines)" for name, lines in changed_code(before, now).items())


def keep_code(inputs: Inputs, before: Inputs | None, run_dir: Path, step: int) -> None:
    """Write the user's code into the run's directory; where it differs from that of `before`, this stays in a folder of its step."""
    folder = run_dir / KEPT
    if before is not None and changed_code(before, inputs):
        _write(before.code, folder / f"until-step-{step:08d}")
    _write(inputs.code, folder)


def _write(code: Mapping[str, str], folder: Path) -> None:
    for name, text in code.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def of_questions(questions: list[Any], source: TaskSource) -> KnownTasks | None:
    """Return what is to be known of the tasks of evaluations; `None` if there are none, or they are those that `source` holds out."""
    if not questions or [task.id for task in questions] == [task.id for task in source.held_out]:
        return None
    return known_tasks(questions)
