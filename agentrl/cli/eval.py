"""``agentrl eval``: how good a model is in an environment, alone or next to another one.

Exit codes: 0 everything was measured, 3 some tasks are in no figure because all of their episodes failed, 1 nothing could be
measured or the evaluation failed, 2 the request was wrong, 130 interrupted: the figures are of the tasks that were done by then.
"""

from __future__ import annotations

import sys

from agentrl.api.background import run_until_signal
from agentrl.api.evaluation import measure
from agentrl.evaluation.config import load_request

INCOMPLETE = 3


def main(words: list[str]) -> int:
    """Run the command.

    Args:
        words: Flags after ``eval``.

    Returns:
        The exit code.
    """
    evaluation = run_until_signal(measure(load_request(words)))
    failed = evaluation.failed_tasks
    if not any(failed):
        return 0
    sys.stderr.write(f"agentrl: {' and '.join(map(str, failed))} of {evaluation.num_tasks} tasks failed and are in no figure\n")
    return INCOMPLETE
