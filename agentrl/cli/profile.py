"""``agentrl profile``: where a run's time went, how far it is from its bound, and what other sizes would give."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.cli.words import command_of, read, word
from agentrl.cluster.processes import ClusterPlan
from agentrl.core.errors import ConfigError
from agentrl.core.settings import Count, CountOrZero
from agentrl.flow.sizes import FlowPlan
from agentrl.inspect.directory import TRAJECTORIES, RunDirectory
from agentrl.profile.recorded import Recorded, read_recorded
from agentrl.profile.report import make_profile, show
from agentrl.resolve.parts import cluster_plan, flow_plan
from agentrl.track.jsonl import encode
from agentrl.track.text import Screen

ASKED = ("num_engines", "num_learners", "max_staleness", "groups_per_step", "oversample")
"""Sizes that a prediction may be asked for."""


@dataclass(frozen=True, kw_only=True)
class ProfileArgs:
    """Say where a run's time went, how far it is from its bound and why, and what other sizes would give."""

    run: str = ""
    """Directory of the run; it may be going on."""
    devices: CountOrZero = 0
    """Devices to divide between engines and learner ranks. 0: as many as the run had."""
    num_engines: Count | None = None
    """Predict this number of engines as well."""
    num_learners: Count | None = None
    """The same with so many learner ranks."""
    max_staleness: int | None = None
    """The same with this staleness bound."""
    groups_per_step: Count | None = None
    """The same with so many groups per step."""
    oversample: float | None = None
    """The same with this share of groups started beyond those of a step."""
    json: bool = False
    """Print one JSON object instead."""


PROFILE = command_of("profile", ProfileArgs, word("run", "RUN"))


def main(words: list[str]) -> int:
    """Run the command with the words after ``profile``."""
    args: ProfileArgs = read(PROFILE, words)
    _check(args)
    run, screen = RunDirectory(args.run), Screen()
    plan, flow = cluster_plan(run.config(), "cpu"), flow_plan(run.config())
    asked = {name: getattr(args, name) for name in ASKED}
    profile = make_profile(recorded_times(run, plan, flow), plan.engine, run=args.run, devices=args.devices, asked=asked)
    if args.json:
        screen.console.file.write(encode(profile) + "\n")
        return 0
    show(screen, profile)
    for line in run.unreadable:
        screen.line((f"not readable: {line}", "yellow"))
    return 0


def recorded_times(run: RunDirectory, plan: ClusterPlan, flow: FlowPlan) -> Recorded:
    """Return the recorded times of a run; a `ConfigError` says what is missing."""
    return read_recorded(
        settings=flow,
        num_engines=flow.num_engines,
        num_learners=plan.num_ranks,
        max_sequences=plan.engine.engine.max_num_seqs,
        metrics=run.metrics(),
        records=run.records() if (run.path / TRAJECTORIES).is_file() else (),
    )


def _check(args: ProfileArgs) -> None:
    for flag, value in (("--max-staleness", args.max_staleness), ("--oversample", args.oversample)):
        if value is not None and value < 0:
            raise ConfigError(flag, value, "is too low", "Give 0 or more.")
