"""``agentrl train``, ``agentrl eval`` and ``agentrl check``: read the words, run what `agentrl.api` wires, and return the exit code."""

from __future__ import annotations

import json
import sys

from agentrl.api.background import run_until_signal
from agentrl.config.commands import TRAIN, load_eval
from agentrl.config.load import load
from agentrl.config.mapping import to_json
from agentrl.core.exit_codes import INCOMPLETE, INTERRUPTED
from agentrl.core.paths import shown_path
from agentrl.flow.state import StopRequest
from agentrl.track.text import counted


def main(words: list[str]) -> int:
    """Train as the flags after ``train`` say: check, start, train, save, sum up."""
    from agentrl.api.directories import in_directory, with_directory
    from agentrl.api.resume import saved_so_far, with_saved_settings

    given = load(TRAIN, with_saved_settings([word for word in words if word != "--dry-run"]))
    from agentrl.api.preview import preview
    from agentrl.api.training import train

    if "--dry-run" in words:
        config = with_directory(given)
        sys.stderr.write("".join(f"agentrl: {line}\n" for line in preview(config)))
        sys.stdout.write(to_json(config) + "\n")
        return 0

    stop = StopRequest()
    with in_directory(given) as config:
        run_dir = config.training.run_dir
        result = run_until_signal(train(config, stop), stop, config.training.stop_timeout_s, lambda: saved_so_far(run_dir))
    if not result.stopped:
        return 0
    again = f"continue with: agentrl train --resume {shown_path(str(run_dir))}"
    sys.stderr.write(f"agentrl: {result.ended}; {again if result.steps else 'no step was done, so nothing was saved'}\n")
    return INTERRUPTED


def evaluate(words: list[str]) -> int:
    """Measure a model as the flags after ``eval`` say, alone or next to another one; the code is 3 if some tasks failed."""
    from agentrl.api.evaluation import measure

    config = load_eval([word for word in words if word != "--dry-run"])
    if "--dry-run" in words:
        sys.stdout.write(to_json(config) + "\n")
        return 0
    evaluation = run_until_signal(measure(config), saved=lambda: "the results are not saved")
    failed = evaluation.failed_tasks
    if not any(failed):
        return 0
    sys.stderr.write(f"agentrl: {' and '.join(map(str, failed))} of {counted(evaluation.num_tasks, 'task')} failed and are in no figure\n")
    return INCOMPLETE


def check(words: list[str]) -> int:
    """Check an environment as the flags after ``check`` say; the code is 1 if there is an error, 3 if there was no time for all checks."""
    from agentrl.api.checking import run_check
    from agentrl.check.findings import CHECK
    from agentrl.check.report import print_report

    config = load(CHECK, words)
    result, flags = run_check(config), config.check
    if flags.json:
        sys.stdout.write(json.dumps(result.to_dict(fix_hints=flags.fix_hints), indent=2) + "\n")
    else:
        print_report(result.report, fix_hints=flags.fix_hints)
    return 1 if not result.ok else INCOMPLETE if result.report.out_of_time else 0
