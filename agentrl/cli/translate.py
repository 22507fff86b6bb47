"""``agentrl translate``: the command of another system as one of agentrl, with what has no counterpart."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentrl.cli.words import command_of, read, word
from agentrl.config.foreign import read_launch
from agentrl.config.load import Loaded, read_flags
from agentrl.config.methods import METHODS
from agentrl.config.sections import settings_of
from agentrl.config.translate import nearest, num_rows, systems, translate
from agentrl.core.errors import ConfigError
from agentrl.core.settings import flag

To = Literal["auto", "train", "sft", "dpo", "kto", "orpo", "distill", "reward-model", "process-reward-model"]


@dataclass(frozen=True, kw_only=True)
class TranslateArgs:
    """Read a command of OpenRLHF, TRL, verl, prime-rl or SkyRL, and write the command of agentrl that means the same.

    Nothing of it is run. Settings that a system has where nothing is written, and that are others here, are written. Exit code: 0 all has
    a meaning here, 1 some has none, 2 bad request.
    """

    source: str = ""
    """A command in quotes; a script of it; a Python file with a call of GRPOConfig, SFTConfig or DPOConfig; a YAML file of TRL or verl; a
    TOML file of prime-rl."""
    to: To = "auto"
    """Command to write. ``auto``: the one that does what the source's program does."""
    output: Path | None = None
    """File for the settings, which --config reads. Unset: they are printed behind the command."""


TRANSLATE = command_of("translate", TranslateArgs, word("source", "SOURCE"))


def main(words: list[str]) -> int:
    """Run the command with the words after ``translate``."""
    args: TranslateArgs = read(TRANSLATE, words)
    launch = read_launch(args.source)
    known = nearest(launch.given, "train", "sft")
    if not known:
        raise ConfigError(
            "SOURCE", args.source[:80], "is of no known system", f"Known are {', '.join(each.name for each in systems().values())}."
        )
    system = known[0]
    command = launch.command(system) if args.to == "auto" else args.to
    keys = {system.key(name) for name in launch.given}
    # Words of the settings before defaults, so that a word that is there decides what depends on it.
    usual = {name: [value] for name, value in system.defaults.get(command, {}).items() if system.key(name) not in keys}
    made = translate(
        system,
        {name: values for name, values in {**usual, **launch.given}.items() if system.knows(name, command)},
        command,
        {},
        rows=num_rows,
    )
    strange = [(name, "no word of the table") for name in launch.given if not system.knows(name, command)]
    missing = [*made.refused, *((name, "its value is computed in the file") for name in launch.unread), *strange]
    sys.stdout.write(f"# {system.name} as agentrl {command}\n" + _shown(command, made.words))
    settings, problem = _settings(command, made.words)
    if args.output is not None:
        args.output.write_text(settings, encoding="utf-8")
    elif settings:
        sys.stdout.write(f"\n# The same as a file for --config\n{settings}")
    _listed("Nothing to write for", made.anyway)
    _listed("No counterpart", [*missing, *problem])
    return 1 if missing or problem else 0


def _shown(command: str, words: list[str]) -> str:
    """The command line, a setting in each line."""
    lines = [f"agentrl {command}"]
    for each in words:
        if each.startswith("--"):
            lines.append(f"  {each}")
        else:
            lines[-1] += f" {shlex.quote(each)}"
    return " \\\n".join(lines) + "\n"


def _settings(command: str, words: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The settings as TOML, and what is wrong with them."""
    from agentrl.resolve import tune
    from agentrl.resolve.commands import TRAIN

    try:
        loaded: Loaded[Any] = read_flags(tune.command_of(command) if command in METHODS else TRAIN, words)
    except ConfigError as error:
        return "", [("together", str(error))]
    values = {name: _value(loaded.settings, name) for name in loaded.sources}
    return "".join(f"{flag(name)[2:].replace('-', '_')} = {json.dumps(value)}\n" for name, value in values.items() if value is not None), []


def _value(settings: Any, name: str) -> Any:
    setting = settings_of(type(settings)).get(name)
    value = getattr(getattr(settings, setting.section), name) if setting else settings.algo.options[name]
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value


def _listed(title: str, rows: list[tuple[str, str]]) -> None:
    if rows:
        sys.stdout.write(f"\n# {title}\n" + "".join(f"#   {name}: {why}\n" for name, why in rows))
