"""Commands whose settings are one section, beside the one that every such command has."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Any

from agentrl.config.load import Command, load
from agentrl.config.words import Word


@dataclass(frozen=True, kw_only=True)
class Common:
    """Settings of every command."""

    debug: bool = False
    """Show tracebacks."""


def word(setting: str, label: str, *, required: bool = True) -> Word:
    """Return a word that sets a setting without a flag."""
    return Word(setting=setting, label=label, required=required, has_flag=False)


def command_of(name: str, section: type[Any], *words: Word) -> Command[Any]:
    """Return the command whose settings are a section, which describes it.

    Args:
        name: Name of the command.
        section: Its settings, all of them with defaults.
        words: Settings that words without flags set, in their order.
    """
    sections = {"settings": section, "common": Common}
    parts = [(part, kind, field(default_factory=kind)) for part, kind in sections.items()]
    settings = make_dataclass(section.__name__, parts, frozen=True, kw_only=True)
    return Command(name, settings, inspect.getdoc(section) or "", words=words, also=())


def read(command: Command[Any], words: Sequence[str]) -> Any:
    """Return the checked section of a command that `command_of` made, with the values that words give.

    Raises:
        ConfigError: If a word is unknown or missing, or a value is wrong.
        SystemExit: With code 0 for ``--help``.
    """
    return load(command, words).settings
