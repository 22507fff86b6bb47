"""Rules for settings that name data sets, shared by commands."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from pathlib import Path

from agentrl.core.errors import ConfigError
from agentrl.core.settings import listed
from agentrl.rollout.template_files import read_template, template_variables


def check_files(flag: str, sources: Sequence[str]) -> None:
    """Check that files that are named are there.

    Raises:
        ConfigError: If one is not.
    """
    for name in sources:
        path = Path(name).expanduser()
        # Any other name may be that of a data set on the hub, which is not asked here.
        if name.endswith((".jsonl", ".json", ".ndjson", ".parquet", ".csv")) and not path.exists():
            raise ConfigError(flag, name, "no such file", f"Looked for {path.absolute()}.")


def check_probabilities(flag: str, given: str, sources_flag: str, sources: Sequence[str]) -> None:
    """Check that there is one positive number per data set.

    Raises:
        ConfigError: If there is not.
    """
    if not given:
        return
    try:
        weights = tuple(map(float, listed(given)))
    except ValueError:
        raise ConfigError(flag, given, "is not a list of numbers", "Write, for example, 0.7,0.3.") from None
    if len(weights) != len(sources):
        problem = f"has {len(weights)} number{'s' * (len(weights) != 1)} for {len(sources)} data set{'s' * (len(sources) != 1)}"
        raise ConfigError(flag, given, problem, f"Give one for each of {sources_flag}, with commas between them.")
    if not all(0 < weight < math.inf for weight in weights):
        raise ConfigError(flag, given, "must hold numbers above 0", "Leave out the data set that is not to be used.")


def check_template(flag: str, template: str) -> None:
    """Check that the prompt has exactly one place in the template.

    Raises:
        ConfigError: If it has not.
    """
    try:
        places = [(name, form, conversion) for _, name, form, conversion in string.Formatter().parse(template) if name is not None]
    except ValueError:
        places = []
    if places != [("", "", None)]:
        problem = "must hold {} exactly once, where the prompt goes"
        raise ConfigError(flag, template, problem, "Write {{ and }} for braces that are meant as such.")


def check_chat_template(file: str, variables: str) -> None:
    """Refuse a file of ``--chat-template`` that cannot be read, and variables of it that are no JSON object.

    Raises:
        ConfigError: If so.
    """
    if file:
        read_template(file)
    template_variables(variables)
