"""``agentrl train``: check, start, train, save, sum up."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path

from agentrl.api.resume import at_directory, resumed_run_dir, with_saved_settings
from agentrl.api.signals import run_until_signal
from agentrl.config.load import load_config, to_json
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.flow.state import StopRequest
from agentrl.track.jsonl import read_lines

INTERRUPTED = 130


def main(words: list[str]) -> int:
    """Run the command.

    Args:
        words: Flags after ``train``.

    Returns:
        The exit code.
    """
    config = load_config(with_saved_settings([word for word in words if word != "--dry-run"]))
    config = at_directory(config, resumed_run_dir(config) or _run_dir(config))
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


def _run_dir(config: TrainConfig) -> Path:
    """The directory of the run, which must not hold another run; one that never made a step may be tried again."""
    if config.run.run_dir is None:
        agent = Path(config.run.agent.partition(":")[0]).stem or "run"
        return Path("runs") / f"{agent}-{datetime.now():%Y%m%d-%H%M%S}"
    path = config.run.run_dir.expanduser()
    if path.exists() and not path.is_dir():
        raise ConfigError("--run-dir", str(path), "is a file", "Name a directory that is new or empty.")
    metrics = path / "metrics.jsonl"
    if metrics.exists() and any(row.get("step", 1) for row in read_lines(metrics)):
        raise ConfigError("--run-dir", str(path), "already holds a run", "Choose another directory, or continue it with --resume.")
    if (path / "eval.json").exists():
        raise ConfigError("--run-dir", str(path), "already holds an evaluation", "Choose another directory.")
    return path
