"""Annotations of settings and options: the ranges that numbers lie in, and notes for the loader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields, replace
from typing import Annotated, Any, TypeVar, get_type_hints

from annotated_types import Ge, Gt, Le

from agentrl.core.errors import ConfigError
from agentrl.core.types import MAX_TEMPERATURE, MIN_TEMPERATURE

Section = TypeVar("Section")

Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
Port = Annotated[int, Ge(0), Le(65_535)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
Share = Annotated[float, Gt(0), Le(1)]
Temperature = Annotated[float, Ge(MIN_TEMPERATURE), Le(MAX_TEMPERATURE)]
TemperatureOrZero = Annotated[float, Ge(0), Le(MAX_TEMPERATURE)]


class ResumeMayChange:
    """Marks a setting that a resumed run may have otherwise: it decides where and how fast the run goes, not what is learnt."""


class UserFile:
    """Marks a setting that may name a function or class of a file, ``file.py:name``, or several of them."""


class Alias:
    """Further flags for a setting; one that names several settings sets all of them. Names of other systems stand in ``other_systems``.

    Attributes:
        flags: The flags.
        command: The command that has them; empty: every command with the setting.
    """

    def __init__(self, *flags: str, command: str = "") -> None:
        self.flags, self.command = flags, command


def flag(name: str) -> str:
    """Return the command-line form of a field name."""
    return "--async" if name == "asynchronous" else "--" + name.replace("_", "-")


def files_renamed(section: Section, rename: Callable[[str], str]) -> Section:
    """Return a section with what `rename` makes of each name that may be that of a `UserFile`."""
    new: dict[str, Any] = {}
    for name, hint in get_type_hints(type(section), include_extras=True).items():
        if UserFile in getattr(hint, "__metadata__", ()):
            value = getattr(section, name)
            new[name] = tuple(map(rename, value)) if isinstance(value, tuple) else rename(value)
    return replace(section, **new)  # type: ignore[type-var]


def listed(value: str) -> tuple[str, ...]:
    """Return the names between commas."""
    return tuple(filter(None, map(str.strip, value.split(","))))


def default_of(item: Field[Any]) -> Any:
    """Return the default of a field of a section."""
    return item.default_factory() if item.default_factory is not MISSING else item.default


def refuse_set(section: Any, names: tuple[str, ...], problem: str, remedy: str) -> None:
    """Refuse settings of a section that differ from their defaults; without names, all of them.

    Raises:
        ConfigError: For the first one.
    """
    for item in fields(section):
        value = getattr(section, item.name)
        if (not names or item.name in names) and value != default_of(item):
            raise ConfigError(flag(item.name), value, problem, remedy)
