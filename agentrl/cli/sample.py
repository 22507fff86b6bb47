"""``agentrl sample``: answers or episodes of a model, scored, as a data set for supervised and preference training."""

from __future__ import annotations

import sys

from agentrl.api.background import run_until_signal
from agentrl.config.mapping import to_json
from agentrl.core.exit_codes import INCOMPLETE
from agentrl.resolve.commands import load_sample
from agentrl.track.text import counted


def main(words: list[str]) -> int:
    """Sample as the flags after ``sample`` say; the code is 3 if some tasks failed."""
    words, dry = [word for word in words if word != "--dry-run"], "--dry-run" in words
    config = load_sample(words)
    from agentrl.api.sampling import preview, sample
    from agentrl.evaluation.samples import FAILED

    if dry:
        sys.stderr.write(f"agentrl: {preview(config)}\n")
        sys.stdout.write(to_json(config) + "\n")
        return 0
    output = config.source.output
    saved = f"go on with the same command and --resume; what is done is in {output}" if output else "name --output to be able to go on"
    sampled = run_until_signal(sample(config), saved=lambda: saved)
    failed = sampled.left_out.get(FAILED, 0)
    if not failed:
        return 0
    sys.stderr.write(f"agentrl: all episodes of {counted(failed, 'task')} failed; these tasks have no row\n")
    return INCOMPLETE
