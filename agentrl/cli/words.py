"""The words after a command whose settings are not sections, read into one dataclass; see `agentrl.config.load` for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tyro
from pydantic import TypeAdapter, ValidationError

from agentrl.config.load import TYRO
from agentrl.config.mapping import field_error


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Flags of every such command."""

    debug: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show tracebacks."""


A = TypeVar("A", bound=Arguments)


def read(arguments: type[A], command: str, words: Sequence[str]) -> A:
    """Read the words after a command.

    Raises:
        ConfigError: If a number is out of the range of its field.
        SystemExit: With code 2 for a malformed word, 0 for ``--help`` (raised by the flag parser).
    """
    return in_range(tyro.cli(arguments, prog=f"agentrl {command}", args=words, config=TYRO), command)


def in_range(args: A, command: str) -> A:
    """Return arguments unchanged if each number is in the range of its field, else raise a `ConfigError`."""
    kind: Any = type(args)
    try:
        TypeAdapter(kind).validate_python(vars(args))
    except ValidationError as error:
        raise field_error(error, command) from None
    return args
