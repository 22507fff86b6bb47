"""``agentrl train``: check, start, train, save, sum up."""

from __future__ import annotations

import sys

from agentrl.api.background import run_until_signal
from agentrl.api.resume import with_directory, with_saved_settings
from agentrl.config.load import load_config, to_json
from agentrl.flow.state import StopRequest

INTERRUPTED = 130


def main(words: list[str]) -> int:
    """Run the command.

    Args:
        words: Flags after ``train``.

    Returns:
        The exit code.
    """
    config = with_directory(load_config(with_saved_settings([word for word in words if word != "--dry-run"])))
    if "--dry-run" in words:
        sys.stdout.write(to_json(config) + "\n")
        return 0
    from agentrl.api.training import train

    stop = StopRequest()
    result = run_until_signal(train(config, stop), stop, config.run.stop_timeout_s)
    if not result.stopped:
        return 0
    go_on = f"continue with: agentrl train --resume {config.run.run_dir}" if result.steps else "no step was done, so nothing was saved"
    sys.stderr.write(f"agentrl: {result.ended}; {go_on}\n")
    return INTERRUPTED
