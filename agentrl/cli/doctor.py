"""``agentrl doctor``: test hypotheses on the records of a run, and name the cause for which it does not learn.

Exit codes: 0 the run learns, 1 causes found, 2 the request was wrong, 3 the records are too few to say.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from agentrl.cli.words import command_of, read, word
from agentrl.track.text import Screen


@dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """Name the cause for which a run does not learn. Exit code: 0 it learns, 1 causes found, 2 bad request, 3 too few episodes to say."""

    run: str = ""
    """Directory of the run, which may still be running."""
    replay: bool = True
    """Replay recorded episodes with the proposed change, where that is possible, to see what it would have paid; this runs the
    environment."""
    agent: str = ""
    """Environment to replay in; by default the run's own."""
    json: bool = False
    """Write the report as JSON."""


DOCTOR = command_of("doctor", DoctorArgs, word("run", "RUN"))


def main(words: list[str]) -> int:
    """Run the command with the words after ``doctor``."""
    args = read(DOCTOR, words)
    from agentrl.api.background import run_until_signal
    from agentrl.doctor.changes import with_replays
    from agentrl.doctor.evidence import Evidence
    from agentrl.doctor.examine import examine
    from agentrl.doctor.report import print_examination
    from agentrl.inspect.reader import RunReader
    from agentrl.track.jsonl import encode

    evidence = Evidence(RunReader(args.run))
    examination = examine(evidence, args.run)
    if args.replay:
        examination = run_until_signal(with_replays(examination, evidence, args.agent))
    if args.json:
        sys.stdout.write(encode(examination.to_dict()) + "\n")
    else:
        print_examination(Screen(), examination)
    return examination.exit_code
