"""``--agent harness:NAME``: one of the programs of `agentrl.harness` as a black-box agent, started and addressed as it wants it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from agentrl.core.errors import ConfigError, EnvLoadError, EnvResultError
from agentrl.core.plugins import suggest
from agentrl.core.types import Task
from agentrl.env.agent import StepResult
from agentrl.env.black_box import ModelEndpoint
from agentrl.env.sandbox.spec import SandboxSpec
from agentrl.harness import DIALECTS, HARNESSES, Harness, Setup
from agentrl.suites.command import CommandAgent, filled, judged_members, split_options, values_of
from agentrl.suites.scheme import FLAG, JUDGE, REWARD, Scheme, in_sandbox
from agentrl.suites.specs import check_options, class_name, split_spec

_log = logging.getLogger(__name__)

FORM = "Write harness:NAME[?brief=True&dialect=chat&program=PATH], then #reward=file.py or #judge=CMD, and #files=FOLDER for files."
_OPTIONS: dict[str, Callable[[Any], bool]] = {
    "brief": lambda value: isinstance(value, bool),
    "dialect": lambda value: value in DIALECTS,
    "program": lambda value: isinstance(value, str),
}
ANSWER_SHARE, MAX_ANSWER = 4, 8192
"""Part of the context, and number of tokens at most, that a program is told to leave for one answer."""
SYSTEM = "/usr"
"""Folder of programs that sandboxes show in any case."""
ROOMY = 200_000
"""Tokens of context that a program is told of at most, as many as the models that it was made for have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledHarness:
    """A program of the table as it is installed here, and the choices of a specification.

    Attributes:
        harness: The program.
        path: Its executable.
        places: Folders of its installation, which it has to see.
        dialect: API that it speaks.
        is_brief: True if its first request is kept short.
    """

    harness: Harness
    path: str
    places: tuple[str, ...]
    dialect: str
    is_brief: bool

    @property
    def options(self) -> str:
        """The choices in the form of a specification."""
        return f"dialect={self.dialect}&brief={self.is_brief}&program={self.path}"

    def started(self, task: Task, llm: ModelEndpoint, work: Path, home: Path) -> Setup:
        """Return words, variables and files, without names in braces, with which it works on a task.

        Args:
            task: The task.
            llm: The endpoint as the program finds it.
            work: Working folder.
            home: Folder of the files.
        """
        values = {**values_of(task, llm, work), **self._values(llm, home)}
        setups = (self.harness.start, *((self.harness.brief,) if self.is_brief else ()))
        words = [word for setup in setups for word in setup.words]
        own = {name: filled(text, values) for setup in setups for name, text in setup.variables.items()}
        return Setup(
            words=(self.path, *(filled(word, values) for word in (*words, *self.harness.task))),
            variables={**llm.env(), "HOME": str(home), **own},
            files={name: filled(text, values) for setup in setups for name, text in setup.files.items()},
        )

    def roomy(self, spec: SandboxSpec) -> SandboxSpec:
        """Return the form of a sandbox with the memory and the processes that the program needs at least."""
        needs = self.harness
        return replace(spec, memory_mib=max(spec.memory_mib, needs.memory_mib), processes=max(spec.processes, needs.processes))

    def _values(self, llm: ModelEndpoint, home: Path) -> dict[str, str]:
        context = min(llm.max_model_len or ROOMY, ROOMY)
        address = llm.anthropic_base_url if self.dialect == "messages" else llm.base_url
        values = {"home": str(home), "address": address, "api": self.harness.dialects[self.dialect], "model": llm.model}
        values |= {"context": str(context), "answer": str(min(MAX_ANSWER, context // ANSWER_SHARE))}
        return {**values, "named": filled(self.harness.named, values)}


class HarnessAgent(CommandAgent):
    """One session of an agent program; its class says of which, and who judges it."""

    installed: ClassVar[InstalledHarness]

    async def _act(self, task: Task, llm: ModelEndpoint, work: Path) -> str:
        """Write the program's settings into its home, run it to its end, and return what it printed."""
        llm, network = self._reached(llm)
        setup = self.installed.started(task, llm, work, self._folder / "home")
        for name, text in setup.files.items():
            await self._sandbox.write(f"home/{name}", text)
        return await self._run([*setup.words], work, {**setup.variables}, read=self.installed.places, network=network)

    async def _judge(self, task: Task, work: Path, output: str) -> StepResult:
        if self.reward is None and not self.judge:
            raise EnvResultError(f"harness: nothing judges the episode. {FORM}")
        return await super()._judge(task, work, output)

    def _spec(self) -> SandboxSpec:
        return self.installed.roomy(super()._spec())


def load_harness(spec: str) -> type[HarnessAgent]:
    """Return the agent for ``harness:NAME[?option=value&...][#reward=file.py|#judge=CMD][#files=FOLDER]``."""
    first, judged = split_options(spec)
    name, installed = find_harness(spec, first, FORM)
    members, rest = judged_members(spec, judged, FORM)
    members |= {"installed": installed, "__doc__": installed.harness.title, "agent_spec": f"harness:{name}?{installed.options}{rest}"}
    return type(class_name(name, "Harness"), (HarnessAgent,), members)


def find_harness(spec: str, asked: str, form: str) -> tuple[str, InstalledHarness]:
    """Return the name and the program that ``NAME[?option=value&...]`` asks for.

    Raises:
        EnvLoadError: If there is no such program, or it is not installed; the message shows the whole specification and its form.
    """
    name, options = split_spec(f":{asked}")
    harness = HARNESSES.get(name)
    if harness is None:
        remedy = suggest(name, list(HARNESSES)) or f"There is {', '.join(HARNESSES)}."
        raise EnvLoadError(FLAG, spec, f"there is no harness {name!r}", remedy)
    check_options(spec, options, _OPTIONS, form, form)
    dialect = options.get("dialect", next(iter(harness.dialects)))
    if dialect not in harness.dialects:
        known = f"It speaks {', '.join(harness.dialects)}."
        raise EnvLoadError(FLAG, spec, f"dialect = {dialect!r}: {harness.title} does not speak it", known)
    wanted = options.get("program", harness.program)
    program = shutil.which(wanted)
    if program is None:
        remedy = f"Install it ({harness.install}), or name it: {name}?program=PATH."
        raise EnvLoadError(FLAG, spec, f"there is no program {wanted!r}", remedy)
    # A link in a folder of programs leads into the installation, which the sandbox has to show.
    path = Path(program).resolve()
    _warn_of_version(harness, path)
    places, is_brief = tuple(map(str, places_of(path))), options.get("brief", False)
    return name, InstalledHarness(harness=harness, path=str(path), places=places, dialect=dialect, is_brief=is_brief)


def places_of(program: Path) -> list[Path]:
    """Return the folders that a program needs of its installation: all its packages, and the interpreter of Node or Python."""
    if modules := [parent for parent in program.parents if parent.name == "node_modules"]:
        node = Path(shutil.which("node") or SYSTEM).resolve()
        # The outermost folder, as packages have packages of their own below them.
        return [modules[-1], *([] if node.is_relative_to(SYSTEM) else [node.parent.parent])]
    venv = next((parent for parent in program.parents if (parent / "pyvenv.cfg").is_file()), None)
    return [program] if venv is None else [venv, *_interpreters(venv)]


def _interpreters(venv: Path) -> Iterator[Path]:
    """Folder of the Python of which a virtual environment was made."""
    for line in (venv / "pyvenv.cfg").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "home":
            yield Path(value.strip()).parent


def version_of(harness: Harness, program: Path) -> str:
    """Return the installed version of a program's package; "" if it cannot be told without running it."""
    for parent in program.parents:
        if parent.name == "node_modules" and (parent / harness.package / "package.json").is_file():
            return str(json.loads((parent / harness.package / "package.json").read_text(encoding="utf-8")).get("version", ""))
        pattern = f"lib/python*/site-packages/{harness.package.replace('-', '_')}-*.dist-info"
        if found := next(parent.glob(pattern), None) if (parent / "pyvenv.cfg").is_file() else None:
            return found.name.removesuffix(".dist-info").rpartition("-")[2]
    return ""


def _warn_of_version(harness: Harness, program: Path) -> None:
    version = version_of(harness, program)
    if version and version != harness.version:
        _log.warning("%s is installed in version %s; %s was tried: %s", harness.title, version, harness.version, harness.install)


def _check_judge(spec: str) -> None:
    if JUDGE not in spec and REWARD not in spec:
        raise ConfigError(FLAG, spec, "nothing says what a session is worth", "Add --reward file.py, or #judge=CMD to --agent.")


HARNESS = Scheme(
    name="harness",
    load=load_harness,
    check=_check_judge,
    programs=in_sandbox,
    takes_reward=True,
    form="harness:NAME",
    about="[agent programs](harnesses.md): Claude Code, Codex, opencode and others",
    needs="the program, and bubblewrap, or podman or docker",
)
