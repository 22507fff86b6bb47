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
    wait_for_machines: bool = False
    """Accept more engines than there is room for: they wait up to ten minutes for machines that the cluster starts by itself."""


def main(words: list[str]) -> int:
    """Ask the run, and print what it answers."""
    args = read(ScaleArgs, "scale", words)
    from agentrl.api.scaling import request_engines

    sys.stdout.write(request_engines(args.run, args.num_engines, grows=args.wait_for_machines) + "\n")
    return 0
