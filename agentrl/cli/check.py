"""``agentrl check``: whether an environment is right, learnable and fast enough, before a model is trained in it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields

import tyro

from agentrl.api.checking import CheckArguments, run_check
from agentrl.api.settings import with_settings
from agentrl.check.report import print_report


@dataclass(frozen=True, kw_only=True)
class CheckFlags(CheckArguments):
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
    flags = tyro.cli(CheckFlags, prog="agentrl check", args=[word for word in words if word != "--debug"])
    given = {item.name: getattr(flags, item.name) for item in fields(CheckArguments)}
    result = run_check(with_settings(CheckArguments(env=""), given, command="check"))
    if flags.json:
        sys.stdout.write(json.dumps(result.to_dict(fix_hints=flags.fix_hints), indent=2) + "\n")
    else:
        print_report(result.report, fix_hints=flags.fix_hints)
    return int(not result.ok)
