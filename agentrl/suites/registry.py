"""Registry of schemes: those of this package, and those that installed packages add by entry points."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from agentrl.core.errors import ConfigError, EnvLoadError
from agentrl.suites.scheme import FLAG, Scheme

BUILT_IN: Mapping[str, str] = {
    "gym": "agentrl.suites.gymnasium_vector:GYM",
    "command": "agentrl.suites.command:COMMAND",
    "harness": "agentrl.suites.harness:HARNESS",
    "reward": "agentrl.suites.rewards:REWARD_SERVERS",
    "answer": "agentrl.suites.rewards:ANSWER",
    "reasoning-gym": "agentrl.suites.reasoning_gym:REASONING_GYM",
    "textarena": "agentrl.suites.games:TEXTARENA",
    "gem": "agentrl.suites.games:GEM",
    "nemo-gym": "agentrl.suites.nemo_gym:NEMO_GYM",
    "openenv": "agentrl.suites.openenv:OPENENV",
    "harbor": "agentrl.suites.harbor.agent:HARBOR",
    "inspect": "agentrl.suites.inspect_tasks:INSPECT",
    "trl": "agentrl.suites.trl_environment:TRL",
    "skyrl": "agentrl.suites.skyrl:SKYRL",
    "verifiers": "agentrl.suites.verifiers_v1:VERIFIERS",
}
"""Places of our schemes by name; the module of a scheme is imported when a specification begins with it."""
FUNCTIONS, SCHEMES = "agentrl.suites", "agentrl.schemes"
"""Groups of entry points: functions of the text behind ``SCHEME:``, whose schemes have the usual facts, and `Scheme` objects."""


def _not_loadable(spec: str) -> Any:
    raise EnvLoadError(FLAG, spec, "begins with no scheme", "Give a file or a module.")


NO_SCHEME = Scheme(name="", load=_not_loadable)
"""Facts of specifications that name a file or a module."""


def scheme_of(spec: str) -> Scheme:
    """Return the scheme that a specification begins with; `NO_SCHEME` if it begins with none.

    Raises:
        EnvLoadError: If several packages declare the scheme, or its `Scheme` cannot be imported.
    """
    name, colon, _ = spec.partition(":")
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        scheme: Scheme = getattr(import_module(module), attribute)
        return scheme
    # Files and modules are recognised first, since the look at all installed packages takes time.
    if not colon or "." in name or "/" in name or name not in installed_schemes():
        return NO_SCHEME
    return _installed_scheme(spec, name, installed_schemes()[name])


def installed_schemes() -> dict[str, list[EntryPoint]]:
    """Return the entry points of installed packages by scheme: several if packages declare the same one."""
    return _installed(tuple(sys.path))


@lru_cache(maxsize=1)
def _installed(path: tuple[str, ...]) -> dict[str, list[EntryPoint]]:
    """Return the entry points that are found on `path`, which is `sys.path`; looking for them reads a file of every package."""
    schemes: dict[str, list[EntryPoint]] = {}
    points = entry_points()
    for point in (*points.select(group=FUNCTIONS), *points.select(group=SCHEMES)):
        schemes.setdefault(point.name, []).append(point)
    return schemes


def _installed_scheme(spec: str, name: str, points: list[EntryPoint]) -> Scheme:
    """Return the scheme of an entry point; a function is imported only when it is called, as its module may load the whole suite."""
    packages = [point.dist.name if point.dist else "an unnamed package" for point in points]
    if len(points) > 1:
        raise EnvLoadError(FLAG, spec, f"several packages declare the scheme {name}: {', '.join(packages)}", "Uninstall all but one.")
    (point,) = points
    if point.group == FUNCTIONS:
        return Scheme(name=name, load=partial(_load, point, lambda spec: point.load()(spec.partition(":")[2])))
    scheme = _blamed(point, spec, point.load)
    if not isinstance(scheme, Scheme):
        raise EnvLoadError(FLAG, spec, f"{_where(point)} is a {type(scheme).__name__}", "It must be an agentrl.suites.scheme.Scheme.")
    return replace(scheme, load=partial(_load, point, scheme.load))


def _load(point: EntryPoint, load: Callable[[str], Any], spec: str) -> Any:
    """Return what the function of an installed scheme makes of a specification.

    Raises:
        EnvLoadError: If the entry point or its function fails; the message names the package, the entry point and the error. A
            `ConfigError` of the function passes unchanged.
    """
    value = _blamed(point, spec, partial(load, spec))
    if not isinstance(value, str) and not callable(value):
        problem = f"{_where(point)} returned a {type(value).__name__}: {str(value)[:80]}"
        raise EnvLoadError(FLAG, spec, problem, "It must return a class, a reward function, or a text that --agent may name.")
    return value


def _blamed(point: EntryPoint, spec: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        problem = f"{_where(point)} raised {type(error).__name__}: {error}"
        raise EnvLoadError(FLAG, spec, problem, f"Correct or uninstall {_package(point)}.") from error


def _where(point: EntryPoint) -> str:
    return f"the entry point {point.name} = {point.value} ({point.group}) of the package {_package(point)}"


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "an unnamed package"
