"""``agentrl iterate``: iterative DPO, or rejection sampling with fine-tuning, round after round."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from agentrl.core.exit_codes import INTERRUPTED


def main(words: list[str]) -> int:
    """Run the rounds that the words after ``iterate`` ask for."""
    from agentrl.config.iterate import load_iterate

    config = load_iterate([word for word in words if word != "--dry-run"])
    from agentrl.api.iterating import check_phases, iterate

    if "--dry-run" in words:
        check_phases(config)
        sys.stdout.write(json.dumps(asdict(config), indent=2, default=str) + "\n")
        return 0
    try:
        iterate(config)
    except KeyboardInterrupt:
        named = f"go on with the same command and --resume --run-dir {config.iterate.run_dir}"
        again = named if config.iterate.run_dir else "name --run-dir to be able to go on"
        sys.stderr.write(f"\nagentrl: interrupted; {again}\n")
        return INTERRUPTED
    return 0
