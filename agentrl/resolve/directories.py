"""Directories of runs, evaluations and data sets: named, and compared with what is there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any

from agentrl.core.directories import held_directory, held_new_directory
from agentrl.core.errors import ConfigError
from agentrl.core.files import write_text
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


def keep_settings(path: Path, settings: str, *, resume: bool, flag: str, kind: str, others: Callable[[Any], list[str]]) -> None:
    """Write the settings of new work into its directory; of work that goes on, make sure that those which are there are the same.

    Args:
        path: The file of settings.
        settings: Its text.
        resume: The work may go on.
        flag: Flag that names the directory.
        kind: The work, in words.
        others: What is there -> the settings that differ.

    Raises:
        ConfigError: If the directory is taken, or settings differ.
    """
    if not path.exists():
        write_text(path, settings + "\n")
        return
    if not resume:
        remedy = "Add --resume to go on with it, or name another directory."
        raise ConfigError(flag, shown_path(path.parent), f"holds a {kind} already", remedy)
    if found := others(json.loads(path.read_text(encoding="utf-8"))):
        problem = f"cannot go on, because it would be another {kind} with {', '.join(found)}"
        raise ConfigError("--resume", True, problem, f"Leave these as they were, or name another {flag}.")


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
