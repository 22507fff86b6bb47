"""``agentrl new``: a copy of a ready-made environment, to be changed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from agentrl.assets import environment_paths
from agentrl.cli.words import command_of, read, word
from agentrl.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class NewArgs:
    """Copy a ready-made environment into a file of your own, to be changed and named with ``--agent``."""

    file: Path = Path()
    """File to write, for example ``my_env.py``; it must not exist yet."""
    example: str = "calculator"
    """Environment to begin with: calculator (two turns, a tool), arithmetic (one turn), guess_number (a game), ..."""


NEW = command_of("new", NewArgs, word("file", "FILE"))


def main(words: list[str]) -> int:
    """Run the command with the words after ``new``."""
    args: NewArgs = read(NEW, words)
    known = environment_paths()
    if args.example not in known:
        raise ConfigError("--example", args.example, "is no ready-made environment", f"There are {', '.join(known)}.")
    if args.file.suffix != ".py":
        raise ConfigError("FILE", str(args.file), "is no Python file", f"Write `agentrl new {args.file.with_suffix('.py')}`.")
    text = known[args.example].read_text(encoding="utf-8").replace(f"envs/{args.example}.py", str(args.file))
    try:
        args.file.parent.mkdir(parents=True, exist_ok=True)
        # Mode x, so that a file which appears meanwhile is not overwritten.
        with args.file.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError("FILE", str(args.file), "exists", "Name a new file.") from None
    except OSError as error:
        raise ConfigError(
            "FILE", str(args.file), f"cannot be written: {error}", "Name a file in a folder that you may write to."
        ) from error
    sys.stdout.write(f"{args.file}: a copy of {args.example}; try `agentrl check {args.file}` and `agentrl play {args.file}`\n")
    return 0
