"""``agentrl scale``: another number of engines for a run under way."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from agentrl.cli.words import Arguments, read


@dataclass(frozen=True, kw_only=True)
class ScaleArgs(Arguments):
    """Let engines join or leave a run that trains now; it goes on meanwhile. Needs Ray, and weights that travel as files (shm, disk)."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Directory of the run."""
    num_engines: int
    """Engines it is to have."""


def main(words: list[str]) -> int:
    """Ask the run, and print what it answers."""
    args = read(ScaleArgs, "scale", words)
    from agentrl.api.scaling import request_engines

    sys.stdout.write(request_engines(args.run, args.num_engines) + "\n")
    return 0
