"""Task folders in the form of Harbor (https://harborframework.com/docs/tasks), read for containers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agentrl.core.errors import EnvLoadError
from agentrl.env.sandbox.spec import SandboxSpec
from agentrl.suites.harbor.tasks import CONFIG, INSTRUCTION, LEAVE_OUT, TEST, read_config, resolved, table, texts
from agentrl.suites.scheme import FLAG

SOLUTION = "solution/solve.sh"
COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
SERVICE_KEYS = ("build", "image", "environment", "working_dir", "command", "entrypoint", "init", "container_name", "pull_policy", "restart")
"""Keys of the one service of a Compose file: those that are followed, and those without effect, as the container waits for commands."""
DEFAULT_MEMORY_MIB, DEFAULT_DISK_MIB, DEFAULT_BUILD_S, DEFAULT_VERIFIER_S = 2048, 10240, 600.0, 600.0
PROCESSES, OPEN_FILES = 512, 4096
SIZES = {"K": 1 / 1024, "M": 1, "G": 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One container that a task asks for.

    Attributes:
        image: Name of an image, or path of a Containerfile or of its folder.
        workdir: Working folder; empty: that of the image.
        env: Environment variables, with those of this process that they name.
        memory_mib: Memory.
        disk_mib: Size of all that is written.
        build_timeout_s: Time for building the image.
        is_public: True if it asks for the network.
    """

    image: str
    workdir: str
    env: Mapping[str, str]
    memory_mib: int
    disk_mib: int
    build_timeout_s: float
    is_public: bool

    def spec(self, *, network: bool) -> SandboxSpec:
        """Return the form of its sandbox; its programs are root, as in Harbor."""
        return SandboxSpec(
            kind="container",
            image=self.image,
            build_timeout_s=self.build_timeout_s,
            root=True,
            memory_mib=self.memory_mib,
            disk_mib=self.disk_mib,
            file_mib=self.disk_mib,
            cpu_s=86_400.0,
            processes=PROCESSES,
            open_files=OPEN_FILES,
            network=network and self.is_public,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerTask:
    """One task folder.

    Attributes:
        folder: Its path.
        instruction: Text for the agent.
        box: Container of the agent.
        verifier: Container of the tests; `None`: the agent's.
        has_tests: True if the image of `verifier` has the tests already.
        artifacts: Files and folders of the agent's container that a `verifier` is given.
        agent_timeout_s: Time of the agent; `None` is no limit.
        verifier_timeout_s: Time of the tests.
        verifier_env: Environment variables of the tests.
        solution_env: Environment variables of the solution.
    """

    folder: Path
    instruction: str
    box: Box
    verifier: Box | None
    has_tests: bool
    artifacts: tuple[str, ...]
    agent_timeout_s: float | None
    verifier_timeout_s: float
    verifier_env: Mapping[str, str]
    solution_env: Mapping[str, str]

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Containers of the agent and of the tests."""
        return (self.box,) if self.verifier is None else (self.box, self.verifier)


def read_container_task(spec: str, folder: Path) -> ContainerTask:
    """Read a task folder; `EnvLoadError` if it lacks something, or asks for what is not supported."""
    config = read_config(spec, folder, INSTRUCTION)
    environment, verifier, agent = (table(config, name) for name in ("environment", "verifier", "agent"))
    own = table(verifier, "environment")
    _check(spec, folder, config, (environment, own), (agent, verifier))
    box = _box(spec, folder, folder / "environment", environment)
    is_separate = verifier.get("environment_mode", "separate" if own else "shared") == "separate"
    tests = folder / "tests"
    has_tests = is_separate and (bool(own.get("docker_image")) or any((tests / name).is_file() for name in ("Dockerfile", *COMPOSE)))
    place = tests if has_tests else folder / "environment"
    asked = {**({} if own else environment), **own} if has_tests else {**environment, **own}
    if not has_tests and not (folder / TEST).is_file():
        raise EnvLoadError(FLAG, spec, f"{folder.name} has no {TEST}", f"A task has {CONFIG}, {INSTRUCTION} and {TEST}.")
    return ContainerTask(
        folder=folder,
        instruction=(folder / INSTRUCTION).read_text(encoding="utf-8").strip(),
        box=box,
        verifier=_box(spec, folder, place, asked) if is_separate else None,
        has_tests=has_tests,
        artifacts=tuple(_artifacts(spec, folder, config.get("artifacts", ()))),
        agent_timeout_s=agent.get("timeout_sec"),
        verifier_timeout_s=float(verifier.get("timeout_sec", DEFAULT_VERIFIER_S)),
        verifier_env=texts(verifier),
        solution_env=texts(table(config, "solution")),
    )


def _check(
    spec: str, folder: Path, config: Mapping[str, Any], environments: Iterable[Mapping[str, Any]], roles: Iterable[Mapping[str, Any]]
) -> None:
    needs = [("steps", config.get("steps"))]
    for environment in environments:
        needs += [(f"environment.{name}", environment.get(name)) for name in ("mcp_servers", "healthcheck", "skills_dir", "gpus", "tpu")]
        needs.append(("environment.os", environment.get("os", "linux").lower() != "linux"))
        needs.append(("environment.network_mode", environment.get("network_mode") == "allowlist"))
    for role in roles:
        needs += [("user", role.get("user", "root") not in ("root", 0)), ("verifier.collect", role.get("collect"))]
    if found := next((name for name, value in needs if value), None):
        raise EnvLoadError(FLAG, spec, f"{folder.name}/{CONFIG} has {found}, which is not supported", LEAVE_OUT)


def _box(spec: str, folder: Path, place: Path, environment: Mapping[str, Any]) -> Box:
    service = _service(spec, folder, place)
    build = service.get("build")
    if isinstance(build, Mapping):
        build = str(Path(str(build.get("context", ".")), str(build.get("dockerfile", ""))))
    image = str(environment.get("docker_image") or service.get("image") or "")
    if not image or build:
        image = str((place / (build or ".")).resolve())
        if not any(Path(image, name).is_file() for name in ("Dockerfile", "Containerfile")) and not Path(image).is_file():
            problem = f"{folder.name}/{place.name} has neither a Dockerfile nor an image"
            raise EnvLoadError(FLAG, spec, problem, f"Add one, or environment.docker_image in {CONFIG}.")
    variables = service.get("environment") or {}
    if not isinstance(variables, Mapping):
        variables = dict(str(line).split("=", 1) for line in variables if "=" in str(line))
    given = {**{str(name): str(value) for name, value in variables.items()}, **texts(environment)}
    return Box(
        image=image,
        workdir=str(environment.get("workdir") or service.get("working_dir") or ""),
        env=resolved(given, os.environ),
        memory_mib=_mib(environment, "memory", DEFAULT_MEMORY_MIB),
        disk_mib=_mib(environment, "storage", DEFAULT_DISK_MIB),
        build_timeout_s=float(environment.get("build_timeout_sec", DEFAULT_BUILD_S)),
        is_public=environment.get("network_mode", "public") == "public" and environment.get("allow_internet", True),
    )


def _service(spec: str, folder: Path, place: Path) -> Mapping[str, Any]:
    """Return the one service of a Compose file; an empty one if there is no such file."""
    file = next((place / name for name in COMPOSE if (place / name).is_file()), None)
    if file is None:
        return {}
    where = f"{folder.name}/{place.name}/{file.name}"
    try:
        services = yaml.safe_load(file.read_text(encoding="utf-8"))["services"]
        (service,) = services.values()
        unknown = [key for key in service if key not in SERVICE_KEYS]
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise EnvLoadError(FLAG, spec, f"{where} does not have one service", LEAVE_OUT) from error
    if unknown:
        raise EnvLoadError(FLAG, spec, f"{where} has {unknown[0]}, which is not supported", LEAVE_OUT)
    return {str(key): value for key, value in service.items()}


def _mib(environment: Mapping[str, Any], name: str, default: int) -> int:
    """Return a size, which is a number of MiB, or in the older form a text such as ``2G``."""
    older = re.fullmatch(r"([\d.]+)([KMG])", str(environment.get(name, "")).upper())
    return int(environment.get(f"{name}_mb") or (float(older[1]) * SIZES[older[2]] if older else default))


def _artifacts(spec: str, folder: Path, listed: Iterable[Any]) -> Iterable[str]:
    for item in listed:
        entry = item if isinstance(item, Mapping) else {"source": item}
        if set(entry) - {"source", "destination"} or not str(entry.get("source", "")).startswith("/"):
            problem = f"{folder.name}/{CONFIG} has the artifact {item!r}, and only absolute paths of the agent's container are supported"
            raise EnvLoadError(FLAG, spec, problem, LEAVE_OUT)
        yield str(entry["source"]).rstrip("/")
