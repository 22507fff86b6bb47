"""Schemes of ``--agent`` that other packages add, each by an entry point in the group ``agentrl.suites``."""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from agentrl.core.errors import ConfigError, EnvLoadError
from agentrl.env.adapters.specs import FLAG

GROUP = "agentrl.suites"


def installed_schemes() -> dict[str, list[EntryPoint]]:
    """Return the entry points of installed packages by scheme: several if packages declare the same one."""
    return _installed(tuple(sys.path))


@lru_cache(maxsize=1)
def _installed(path: tuple[str, ...]) -> dict[str, list[EntryPoint]]:
    """Return the entry points that are found on `path`, which is `sys.path`; looking for them reads a file of every package."""
    schemes: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        schemes.setdefault(point.name, []).append(point)
    return schemes


def load_installed(spec: str) -> Any:
    """Return what the function behind an installed scheme makes of the text behind ``SCHEME:``.

    Raises:
        EnvLoadError: If several packages declare the scheme, or if the entry point or its function fails; the message names
            the package, the entry point and the error. A `ConfigError` of the function passes unchanged.
    """
    scheme, _, text = spec.partition(":")
    points = installed_schemes()[scheme]
    packages = [point.dist.name if point.dist else "an unnamed package" for point in points]
    if len(points) > 1:
        raise EnvLoadError(FLAG, spec, f"several packages declare the scheme {scheme}: {', '.join(packages)}", "Uninstall all but one.")
    where = f"the entry point {scheme} = {points[0].value} ({GROUP}) of the package {packages[0]}"
    try:
        value = points[0].load()(text)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvLoadError(FLAG, spec, f"{where} raised {type(error).__name__}: {error}", f"Correct or uninstall {packages[0]}.") from error
    if not isinstance(value, str) and not callable(value):
        problem = f"{where} returned a {type(value).__name__}: {str(value)[:80]}"
        raise EnvLoadError(FLAG, spec, problem, "It must return a class, a reward function, or a text that --agent may name.")
    return value
