"""``agentrl doctor``: examine this machine before a run, or name the cause for which a run does not learn.

Exit codes for a machine: 0 nothing is wrong, 1 something is, 2 the request was wrong. For a run: 0 it learns, 1 causes found, 2 the request
was wrong, 3 the records are too few to say.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from agentrl.cli.words import command_of, read, word
from agentrl.core.errors import ConfigError
from agentrl.track.text import Screen

if TYPE_CHECKING:
    from agentrl.doctor.machine.cluster import ClusterReport
    from agentrl.doctor.machine.findings import MachineReport


@dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """Without RUN: examine this machine, in three minutes. With RUN: name the cause for which a run does not learn.

    Exit code for a machine: 0 nothing is wrong, 1 something is, 2 bad request. For a run: 0 it learns, 1 causes found, 2 bad request, 3
    too few episodes to say.
    """

    run: str = ""
    """Directory of a run, which may still be running; without it this machine is examined."""
    replay: bool = True
    """Replay recorded episodes of the run with the proposed change, where that is possible, to see what it would have paid; this runs the
    environment."""
    agent: str = ""
    """Environment to replay in; by default the run's own."""
    trials: bool = True
    """Try the machine's devices, kernels, transfers and two steps of training; without them the facts alone are read, in a second."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of device to try; ``auto``: GPUs where there are some."""
    ray_address: str = ""
    """Examine every machine of the Ray cluster at this address (``host:port`` or ``auto``), compare them, and send between them."""
    json: bool = False
    """Write the report as JSON."""


DOCTOR = command_of("doctor", DoctorArgs, word("run", "RUN", required=False))


def main(words: list[str]) -> int:
    """Run the command with the words after ``doctor``."""
    args = read(DOCTOR, words)
    if not args.run:
        return _machine(args)
    if args.ray_address:
        problem = "examines machines, and a run is named too"
        raise ConfigError("--ray-address", args.ray_address, problem, f"Leave out one of them: {args.run} or the flag.")
    from agentrl.api.background import run_until_signal
    from agentrl.doctor.changes import with_replays
    from agentrl.doctor.evidence import Evidence
    from agentrl.doctor.examine import examine
    from agentrl.doctor.report import print_examination
    from agentrl.inspect.reader import RunReader
    from agentrl.track.jsonl import encode

    reader = RunReader(args.run)
    reader.directory.played()
    evidence = Evidence(reader)
    examination = examine(evidence, args.run)
    if args.replay:
        examination = run_until_signal(with_replays(examination, evidence, args.agent))
    if args.json:
        sys.stdout.write(encode(examination.to_dict()) + "\n")
    else:
        print_examination(Screen(), examination)
    return examination.exit_code


def _machine(args: Any) -> int:
    from agentrl.api.background import run_until_signal
    from agentrl.doctor.machine.cluster import ClusterReport, examine_cluster
    from agentrl.doctor.machine.examine import examine
    from agentrl.doctor.machine.report import print_machine

    report: MachineReport | ClusterReport
    if args.ray_address:
        report = run_until_signal(examine_cluster(args.ray_address, args.device, trials=args.trials))
    else:
        report = examine(args.device, trials=args.trials, tell=_progress)
    if args.json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=2) + "\n")
    else:
        for each in (*report.machines, report.between) if isinstance(report, ClusterReport) else (report,):
            print_machine(Screen(), each)
    return report.exit_code


def _progress(stage: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"trying {stage} ...\n")
