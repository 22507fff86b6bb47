"""Parts of settings: the flag of a field, and changes to what is made of sections."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

from agentrl.core.ranges import Count as Count
from agentrl.core.ranges import CountOrZero as CountOrZero
from agentrl.core.ranges import Fraction as Fraction
from agentrl.core.ranges import NonNegative as NonNegative
from agentrl.core.ranges import Positive as Positive
from agentrl.core.ranges import Temperature as Temperature
from agentrl.core.ranges import TemperatureOrZero as TemperatureOrZero

Record = Literal["none", "sample", "all"]

Sections = TypeVar("Sections")


def flag(name: str) -> str:
    """Return the command-line form of a field name."""
    return "--async" if name == "asynchronous" else "--" + name.replace("_", "-")


def changed(config: Sections, **values: Any) -> Sections:
    """Return `config` with settings replaced, each named as in its section.

    Args:
        config: A dataclass with sections of the schema as fields.
        values: New values by field name, unchecked.

    Raises:
        TypeError: If no section has a field of that name.
    """
    sections = {item.name: getattr(config, item.name) for item in fields(config) if is_dataclass(getattr(config, item.name))}  # type: ignore[arg-type]
    homes = {item.name: name for name, section in sections.items() for item in fields(section)}
    if unknown := values.keys() - homes.keys():
        raise TypeError(f"no section of {type(config).__name__} has a setting named {', '.join(sorted(unknown))}")
    for name, value in values.items():
        sections[homes[name]] = replace(sections[homes[name]], **{name: value})
    return replace(config, **sections)  # type: ignore[type-var]


def num_recorded(record: Record, episodes: int) -> int:
    """Return how many of a group's `episodes` are recorded."""
    return {"none": 0, "sample": 1, "all": episodes}[record]
