"""``agentrl train``, ``agentrl eval`` and ``agentrl check``: read the words, run what `agentrl.api` wires, and return the exit code."""

from __future__ import annotations

import json
import sys

from agentrl.api.background import run_until_signal
from agentrl.config.load import load
from agentrl.config.mapping import to_json
from agentrl.core.exit_codes import INCOMPLETE, INTERRUPTED
from agentrl.core.fingerprints import ACCEPT
from agentrl.core.paths import shown_path
from agentrl.flow.state import StopRequest
from agentrl.resolve.commands import load_eval, read_train
from agentrl.track.text import counted


def main(words: list[str]) -> int:
    """Train as the flags after ``train`` say: check, start, train, save, sum up."""
    from agentrl.api.rewinding import saved_so_far
    from agentrl.resolve.plan import RunPlan
    from agentrl.resolve.saved import with_saved_settings

    settings = [word for word in words if word not in ("--dry-run", ACCEPT)]
    plan = RunPlan.of(read_train(with_saved_settings(settings)), accepts_changes=ACCEPT in words)
    # Imported only now, so that a wrong setting is refused without waiting for it.
    from agentrl.api.preview import preview
    from agentrl.api.training import train

    if "--dry-run" in words:
        sys.stderr.write("".join(f"agentrl: {line}\n" for line in preview(plan)))
        sys.stdout.write(plan.to_json() + "\n")
        return 0

    stop = StopRequest()
    with plan.in_directory() as held:
        run = held.settings.training
        result = run_until_signal(train(held, stop), stop, run.stop_timeout_s, lambda: saved_so_far(run.run_dir))
    if not result.stopped:
        return 0
    again = f"continue with: agentrl train --resume {shown_path(str(run.run_dir))}"
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
