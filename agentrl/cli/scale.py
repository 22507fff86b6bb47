"""``agentrl scale``: another number of engines for a run under way."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from agentrl.cli.words import command_of, read, word
from agentrl.core.errors import ConfigError
from agentrl.core.settings import Count


@dataclass(frozen=True, kw_only=True)
class ScaleArgs:
    """Let engines join or leave a run that trains now; it goes on meanwhile. Needs Ray, and weights that travel as files (shm, disk)."""

    run: Path = Path()
    """Directory of the run."""
    num_engines: Count | None = None
    """Engines it is to have. Required."""
    wait_for_machines: bool = False
    """Accept more engines than there is room for: they wait up to ten minutes for machines that the cluster starts by itself."""


SCALE = command_of("scale", ScaleArgs, word("run", "RUN"))


def main(words: list[str]) -> int:
    """Ask the run, and print what it answers."""
    args: ScaleArgs = read(SCALE, words)
    if args.num_engines is None:
        raise ConfigError("--num-engines", None, "is not given", f"Write `agentrl scale {args.run} --num-engines N`.")
    from agentrl.api.scaling import request_engines

    sys.stdout.write(request_engines(args.run, args.num_engines, grows=args.wait_for_machines) + "\n")
    return 0
