"""Task folders in the form of Harbor (https://harborframework.com/docs/tasks), read for a machine without containers.

A folder holds ``instruction.md``, ``task.toml``, ``environment/`` and ``tests/test.sh``. Paths of its container stand for paths below a
folder of the episode, its root: ``/app/data.txt`` is ``ROOT/app/data.txt``. ``environment/Dockerfile`` is followed as far as it fills such
folders.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from agentrl.core.errors import EnvError, EnvLoadError, EnvResultError
from agentrl.suites.scheme import FLAG

CONFIG, INSTRUCTION, TEST = "task.toml", "instruction.md", "tests/test.sh"
DOCKERFILE = "environment/Dockerfile"
APP, TESTS, VERIFIER = "/app", "/tests", "/logs/verifier"
REWARDS = ("reward.json", "reward.txt")
"""Files of `VERIFIER` that may hold the reward, the first that is there counts."""
SYSTEM = ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "usr", "var")
"""Folders of the machine, which a task may read and not fill."""
NEEDED = "a container, which this machine's processes do not have"
LEAVE_OUT = "Leave the task out, or run it with Harbor."
WITHOUT_EFFECT = (
    "FROM",
    "ARG",
    "CMD",
    "ENTRYPOINT",
    "EXPOSE",
    "LABEL",
    "MAINTAINER",
    "SHELL",
    "STOPSIGNAL",
    "USER",
    "HEALTHCHECK",
    "VOLUME",
)
MAX_TEXT = 2**20
"""Bytes of a file of ``tests/`` in which the paths of the container are replaced; larger ones are data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of a Dockerfile that is followed.

    Attributes:
        folder: Working folder at that line, as a path of the container.
        sources: Files and folders that are copied; none for a command.
        target: Where they are copied to, as a path of the container; a folder if it ends with a slash.
        command: Shell command.
    """

    folder: str
    sources: tuple[Path, ...] = ()
    target: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """One task folder.

    Attributes:
        folder: Its path.
        instruction: What the agent is told, with paths of the container.
        workdir: Working folder of the agent and of the tests, as a path of the container.
        env: Environment variables of the container.
        steps: Lines of the Dockerfile that are followed, in order.
        agent_timeout_s: Time of the agent; `None` is no limit.
        verifier_timeout_s: Time of ``tests/test.sh``.
        verifier_env: Environment variables of ``tests/test.sh``; ``${NAME}`` stands for a variable of this process.
    """

    folder: Path
    instruction: str
    workdir: str
    env: Mapping[str, str]
    steps: tuple[Step, ...]
    agent_timeout_s: float | None
    verifier_timeout_s: float
    verifier_env: Mapping[str, str]

    @property
    def has_commands(self) -> bool:
        """True if its Dockerfile runs commands."""
        return any(step.command for step in self.steps)

    @property
    def places(self) -> tuple[str, ...]:
        """Paths of the container that are below the root."""
        targets = [step.target.rstrip("/") for step in self.steps if step.sources]
        return tuple(dict.fromkeys((self.workdir, APP, TESTS, "/logs", "/solution", *(step.folder for step in self.steps), *targets)))

    def shown(self) -> str:
        """The instruction with paths relative to the working folder, which are the same in all episodes."""
        return with_paths(self.instruction, {place: os.path.relpath(place, self.workdir) for place in self.places})


def task_folders(spec: str, folder: Path) -> list[Path]:
    """Return the folder if it is a task, else the tasks in it, by name; `EnvLoadError` if there is none."""
    if (folder / CONFIG).is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob(f"*/{CONFIG}")) if folder.is_dir() else []
    if not found:
        problem = f"there is no task in {str(folder)!r}" if folder.is_dir() else f"there is no folder {str(folder)!r}"
        raise EnvLoadError(FLAG, spec, problem, f"Name a folder with {CONFIG}, {INSTRUCTION} and {TEST}, or one of such folders.")
    return found


def read_task(spec: str, folder: Path) -> HarborTask:
    """Read a task folder; `EnvLoadError` if it lacks something, or needs what a process of this machine does not have."""
    config = read_config(spec, folder, INSTRUCTION, TEST)
    environment, verifier, agent = (table(config, name) for name in ("environment", "verifier", "agent"))
    _check(spec, folder, config, environment, verifier)
    workdir, steps, variables = _dockerfile(spec, folder, str(environment.get("workdir") or APP))
    return HarborTask(
        folder=folder,
        instruction=(folder / INSTRUCTION).read_text(encoding="utf-8").strip(),
        workdir=str(environment.get("workdir") or workdir),
        env={**variables, **texts(environment)},
        steps=steps,
        agent_timeout_s=agent.get("timeout_sec"),
        verifier_timeout_s=float(verifier.get("timeout_sec", 600.0)),
        verifier_env=texts(verifier),
    )


def read_config(spec: str, folder: Path, *files: str) -> dict[str, Any]:
    """Return the configuration of a task folder; `EnvLoadError` if it lacks one of the files, or the configuration is not TOML."""
    if lacking := next((name for name in files if not (folder / name).is_file()), None):
        raise EnvLoadError(FLAG, spec, f"{folder.name} has no {lacking}", f"A task has {CONFIG}, {INSTRUCTION} and {TEST}.")
    try:
        return tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise EnvLoadError(FLAG, spec, f"{folder.name}/{CONFIG} is not TOML: {error}", "Correct it.") from error


def table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a configuration, empty if it is not there."""
    value = config.get(name, {})
    return value if isinstance(value, Mapping) else {}


def texts(section: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that a section of a configuration sets."""
    return {str(name): str(value) for name, value in table(section, "env").items()}


def _check(spec: str, folder: Path, config: Mapping[str, Any], environment: Mapping[str, Any], verifier: Mapping[str, Any]) -> None:
    needs = {
        "steps": config.get("steps"),
        "environment.os": environment.get("os", "linux") != "linux",
        "environment.mcp_servers": environment.get("mcp_servers"),
        "environment.tpu": environment.get("tpu"),
        "verifier.environment_mode": verifier.get("environment_mode", "shared") != "shared",
        "verifier.environment": verifier.get("environment"),
    }
    if found := next((name for name, value in needs.items() if value), None):
        raise EnvLoadError(FLAG, spec, f"{folder.name}/{CONFIG} has {found}, which needs {NEEDED}", LEAVE_OUT)
    compose = next(iter(folder.glob("environment/*compose*.y*ml")), None)
    if compose is not None:
        raise EnvLoadError(FLAG, spec, f"{folder.name} has {compose.name}, which needs {NEEDED}", LEAVE_OUT)


def _dockerfile(spec: str, folder: Path, workdir: str) -> tuple[str, tuple[Step, ...], dict[str, str]]:
    """The last working folder, the steps, and the variables; without a Dockerfile the files of the environment are copied."""
    file = folder / DOCKERFILE
    if not file.is_file():
        sources = (folder / "environment",) if (folder / "environment").is_dir() else ()
        return workdir, (Step(folder=workdir, sources=sources, target=f"{workdir}/"),), {}
    steps: list[Step] = []
    variables: dict[str, str] = {}
    for instruction, rest in _lines(file.read_text(encoding="utf-8")):
        if instruction == "WORKDIR":
            workdir = _place(spec, folder, str(PurePosixPath(workdir) / rest.strip("\"'")))
        elif instruction == "ENV":
            variables.update(_variables(rest))
        elif instruction == "RUN":
            steps.append(Step(folder=workdir, command=shlex.join(json.loads(rest)) if rest.startswith("[") else rest))
        elif instruction in ("COPY", "ADD"):
            steps.append(_copy(spec, folder, workdir, f"{instruction} {rest}"))
        elif instruction not in WITHOUT_EFFECT:
            raise EnvLoadError(
                FLAG, spec, f"{folder.name}/{DOCKERFILE}: {instruction} is not known", "There is COPY, ENV, RUN and WORKDIR."
            )
    return workdir, tuple(steps), variables


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Instructions of a Dockerfile and what follows them, with continued lines joined."""
    # Comments go before lines are joined: Docker drops them in the midst of a continued line too.
    kept = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\s*\n", " ", "\n".join(kept)).splitlines():
        instruction, _, rest = line.strip().partition(" ")
        yield instruction.upper(), rest.strip()


def _variables(rest: str) -> dict[str, str]:
    name, space, value = rest.partition(" ")
    if space and "=" not in name:
        return {name: value.strip()}
    return dict(word.split("=", 1) for word in shlex.split(rest) if "=" in word)


def _copy(spec: str, folder: Path, workdir: str, line: str) -> Step:
    where, remedy = f"{folder.name}/{DOCKERFILE}", "Copy files of the folder environment/."
    words = json.loads(line[line.index("[") :]) if "[" in line and line.endswith("]") else shlex.split(line)[1:]
    options = [word for word in words if word.startswith("--")]
    *names, target = [word for word in words if not word.startswith("--")]
    if any(option.startswith("--from") for option in options) or any("://" in name for name in names) or not names:
        raise EnvLoadError(FLAG, spec, f"{where}: {line!r} copies from elsewhere", remedy)
    context = folder / "environment"
    sources: list[Path] = []
    for name in names:
        sources += sorted(context.glob(name.lstrip("/"))) if name.strip("./") else [context]
    # A link, or two dots in the name, may lead out of the folder of the task.
    if not sources or not all(path.resolve().is_relative_to(context.resolve()) for path in sources):
        raise EnvLoadError(FLAG, spec, f"{where}: {line!r} names no file of environment/", remedy)
    into = len(sources) > 1 or target.endswith(("/", ".")) or sources[0].is_dir()
    place = _place(spec, folder, os.path.normpath(PurePosixPath(workdir) / target))
    return Step(folder=workdir, sources=tuple(sources), target=f"{place}/" if into else place)


def _place(spec: str, folder: Path, place: str) -> str:
    """A path of the container that may be below the root."""
    if len(parts := PurePosixPath(place).parts) < 2 or parts[1] in SYSTEM:
        remedy = "Use folders of the task's own, such as /app."
        raise EnvLoadError(FLAG, spec, f"{folder.name}/{DOCKERFILE} fills {place}, which is this machine's", remedy)
    return place


def with_paths(text: str, paths: Mapping[str, str]) -> str:
    """The text with each path of the container replaced where it stands alone or begins a longer path."""
    # The longest first: a path would otherwise be replaced by that of a folder above it.
    names = "|".join(re.escape(place) for place in sorted(paths, key=len, reverse=True))
    return re.sub(rf"(?<![\w./~$}}-])(?:{names})(?![\w-]|\.\w)", lambda found: paths[found[0]], text)


def copy_step(step: Step, root: Path) -> None:
    """Copy the files of a step below the root."""
    target = root / step.target.strip("/")
    for source in step.sources:
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns("Dockerfile", ".dockerignore"))
        else:
            file = target / source.name if step.target.endswith("/") else target
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, file)


def copy_tests(task: HarborTask, target: Path, paths: Mapping[str, str]) -> None:
    """Copy the tests to a new folder, with paths below the root in place of those of the container."""

    def copy(source: str, file: str) -> None:
        shutil.copy2(source, file)
        # A zero byte marks what is no text, and so stands for a file that is too large.
        data = Path(source).read_bytes() if os.path.getsize(source) <= MAX_TEXT else b"\0"
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return
        if "\0" not in text and (replaced := with_paths(text, paths)) != text:
            Path(file).write_text(replaced, encoding="utf-8")

    shutil.copytree(task.folder / "tests", target, copy_function=copy)


def resolved(variables: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of a verifier, with ``${NAME}`` and ``${NAME:-default}`` taken from the environment; `EnvError` if one is not set."""

    def value_of(found: re.Match[str]) -> str:
        value = environment.get(found[1], found[2])
        if value is None:
            raise EnvError(f"the tests need the environment variable {found[1]} ([verifier.env]), which is not set")
        return value

    return {name: re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", value_of, value) for name, value in variables.items()}


def read_rewards(files: Mapping[str, str], printed: str) -> dict[str, float]:
    """The rewards that the tests wrote, by name; `EnvResultError` if there are none, or if one is no finite number.

    Args:
        files: Content of those of `REWARDS` that are there.
        printed: Output of the tests.
    """
    name = next((name for name in REWARDS if name in files), "")
    if not name:
        last = (printed.strip().splitlines() or [""])[-1][-200:]
        raise EnvResultError(f"{TEST} wrote neither {' nor '.join(f'{VERIFIER}/{name}' for name in REWARDS)}; it printed last: {last!r}")
    text = files[name]
    try:
        found = json.loads(text) if name.endswith(".json") else float(text)
        rewards = {str(key): float(value) for key, value in (found if isinstance(found, dict) else {"reward": found}).items()}
    except (ValueError, TypeError):
        rewards = {}
    if not rewards or not all(map(math.isfinite, rewards.values())):
        raise EnvResultError(f"{TEST} wrote {text[:80]!r} to {VERIFIER}/{name}; it must be a number, or in JSON an object of numbers")
    return rewards
