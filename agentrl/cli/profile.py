"""``agentrl profile``: where a run's time went, and how far it is from its bound."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.cli.words import command_of, read, word
from agentrl.inspect.directory import RunDirectory
from agentrl.profile.recorded import read_recorded
from agentrl.profile.report import make_profile, show
from agentrl.resolve.parts import cluster_plan, flow_plan
from agentrl.track.jsonl import encode
from agentrl.track.text import Screen


@dataclass(frozen=True, kw_only=True)
class ProfileArgs:
    """Say where a run's time went, and how far it is from its bound."""

    run: str = ""
    """Directory of the run; it may be going on."""
    json: bool = False
    """Print one JSON object instead."""


PROFILE = command_of("profile", ProfileArgs, word("run", "RUN"))


def main(words: list[str]) -> int:
    """Run the command with the words after ``profile``."""
    args: ProfileArgs = read(PROFILE, words)
    run, screen = RunDirectory(args.run), Screen()
    plan, flow = cluster_plan(run.config(), "cpu"), flow_plan(run.config())
    profile = make_profile(read_recorded(run.metrics(), settings=flow, num_learners=plan.num_ranks), plan.engine, run=args.run)
    if args.json:
        screen.console.file.write(encode(profile) + "\n")
        return 0
    show(screen, profile)
    for line in run.unreadable:
        screen.line((f"not readable: {line}", "yellow"))
    return 0
