"""Directories of runs, evaluations and data sets: named, and compared with what is there."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path

from agentrl.core.directories import held_directory, held_new_directory
from agentrl.core.errors import ConfigError
from agentrl.core.paths import shown_path
from agentrl.env.given import PREFIX
from agentrl.track.jsonl import read_lines


def agent_name(agent: str) -> str:
    """Return a short name of an environment, for the names of directories."""
    return Path(agent.removeprefix(PREFIX).partition(":")[0]).stem or "run"


def default_directory(name: str) -> Path:
    """Return the directory of what begins now and has been given none."""
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def results_directory(output: Path | None, agent: str, command: str) -> AbstractContextManager[Path]:
    """Hold the directory for the results of a command: `output`, or a new one named after command and environment.

    Raises:
        ConfigError: If it cannot be made, or another process writes to it.
    """
    if output is not None:
        return held_directory(output, "--output")
    return held_new_directory(default_directory(f"{command}-{agent_name(agent)}"), "--output")


def check_free(path: Path) -> None:
    """Refuse a directory that cannot be made or holds another run; one that never made a step may be tried again.

    Raises:
        ConfigError: If it is taken.
    """
    there = next(part for part in (path, *path.parents) if os.path.exists(part))
    if not there.is_dir():
        problem = "is a file" if there == path else f"cannot be made: {there} is a file"
        raise ConfigError("--run-dir", shown_path(path), problem, "Name a directory that is new or empty.")
    metrics = path / "metrics.jsonl"
    if os.path.exists(metrics) and any(row.get("step", 1) for row in read_lines(metrics)):
        raise ConfigError("--run-dir", shown_path(path), "already holds a run", "Choose another directory, or continue it with --resume.")
    if os.path.exists(path / "eval.json"):  # pathlib's raises if the folder may not be read
        raise ConfigError("--run-dir", shown_path(path), "already holds an evaluation", "Choose another directory.")
