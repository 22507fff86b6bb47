"""``agentrl check``: whether an environment is right, learnable and fast enough, before a model is trained in it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

import tyro

from agentrl.api.checking import run_check
from agentrl.api.settings import with_settings
from agentrl.check.findings import CheckSettings
from agentrl.check.report import print_report
from agentrl.config.load import TYRO, expand_aliases


@dataclass(frozen=True, kw_only=True)
class CheckFlags(CheckSettings):
    """Play an environment without a model and report what is wrong with it. Exit code: 0 no errors, 1 errors, 2 bad request."""

    json: bool = False
    """Write the report as JSON."""
    fix_hints: bool = False
    """Show a piece of code with each remedy."""


def main(words: list[str]) -> int:
    """Run the command.

    Args:
        words: Flags after ``check``.

    Returns:
        0 if there is no error, 1 if there is one.
    """
    flags = tyro.cli(CheckFlags, prog="agentrl check", args=_words(words), config=TYRO)
    given = {name: value for item in fields(CheckSettings) for name, value in _settings(item.name, getattr(flags, item.name))}
    result = run_check(with_settings(CheckSettings(env=""), given, command="check"))
    if flags.json:
        sys.stdout.write(json.dumps(result.to_dict(fix_hints=flags.fix_hints), indent=2) + "\n")
    else:
        print_report(result.report, fix_hints=flags.fix_hints)
    return int(not result.ok)


def _words(words: list[str]) -> list[str]:
    return [word for word in expand_aliases(words) if word != "--debug"]


def _settings(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    """A setting with its name, or all of a section."""
    return asdict(value).items() if is_dataclass(value) and not isinstance(value, type) else [(name, value)]
