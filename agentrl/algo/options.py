"""Options of an algorithm: a frozen dataclass beside its function, whose fields have the names of the flags that set them.

Each field carries its range and its default, and below it the text that explains the flag; a field that only changes the default of an
inherited one keeps the text of that. What an algorithm has an option for, it reads.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """Options of an algorithm that has none."""


def option_names(options: type[Any]) -> tuple[str, ...]:
    """Return the names of the options in a class of options."""
    return tuple(item.name for item in fields(options))


def checked_options(options: type[Any], base: type[Any] = object) -> type[Any]:
    """Return a class of options that an algorithm can be made with; see `agentrl.algo.facts`.

    Args:
        options: The class that a decorator was given.
        base: Class whose options every algorithm of that kind has.

    Raises:
        TypeError: If it is no frozen dataclass, does not inherit from `base`, or has an option without a default.
    """
    # In the class itself: one that inherits from a dataclass without being one has fields that nobody reads.
    if not isinstance(options, type) or not is_dataclass(options) or "__dataclass_params__" not in vars(options):
        raise TypeError(f"options={options!r} is not a dataclass; put @dataclass(frozen=True, kw_only=True) above the class")
    if not vars(options)["__dataclass_params__"].frozen:
        raise TypeError(f"options={options.__name__} can be changed; put @dataclass(frozen=True, kw_only=True) above the class")
    if not issubclass(options, base):
        raise TypeError(f"options={options.__name__} lacks options that all have; write class {options.__name__}({base.__name__})")
    if required := [item.name for item in fields(options) if item.default is MISSING and item.default_factory is MISSING]:
        raise TypeError(f"options={options.__name__} has no default for {', '.join(required)}; give each option one")
    return options
