"""``agentrl sft``, ``dpo`` and the other methods of `agentrl.tune`: read the words, run, and return the exit code."""

from __future__ import annotations

import sys
from functools import partial

from agentrl.core.exit_codes import INTERRUPTED


def main(command: str, words: list[str]) -> int:
    """Train by the method of a command as the words after it say."""
    from agentrl.config.methods import METHODS
    from agentrl.core.paths import shown_path
    from agentrl.resolve.tune import load
    from agentrl.tune.run import preview, run

    plan = load(METHODS[command], [word for word in words if word != "--dry-run"])
    if "--dry-run" in words:
        sys.stderr.write("".join(f"agentrl: {line}\n" for line in preview(plan)))
        sys.stdout.write(plan.to_json() + "\n")
        return 0
    result = run(plan)
    if result.status == "finished":
        return 0
    sys.stderr.write(f"agentrl: interrupted; continue with: agentrl {command} --resume {shown_path(result.run_dir)}\n")
    return INTERRUPTED


sft, dpo, kto, orpo, distill = (partial(main, command) for command in ("sft", "dpo", "kto", "orpo", "distill"))
reward_model, process_reward_model = partial(main, "reward-model"), partial(main, "process-reward-model")
