"""Directories of runs, evaluations and data sets: named, made, and held against other processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path

from agentrl.api.resume import AUTO, resumed_run_dir
from agentrl.config.evaluate import EvaluateConfig, SampleConfig
from agentrl.config.schema import PlaySettings, TrainConfig
from agentrl.config.sections import changed
from agentrl.core.directories import held_directory, held_new_directory
from agentrl.core.errors import ConfigError
from agentrl.core.paths import absolute_path, shown_path
from agentrl.env.given import PREFIX
from agentrl.track.jsonl import read_lines


def agent_name(config: PlaySettings) -> str:
    """Return a short name of the environment, for the names of directories."""
    return Path(config.run.agent.removeprefix(PREFIX).partition(":")[0]).stem or "run"


def default_directory(name: str) -> Path:
    """Return the directory of what begins now and has been given none."""
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def results_directory(config: EvaluateConfig | SampleConfig, command: str) -> AbstractContextManager[Path]:
    """Hold the directory for the results of a command.

    Raises:
        ConfigError: If it cannot be made, or another process writes to it.
    """
    if (output := config.source.output) is not None:
        return held_directory(output, "--output")
    return held_new_directory(default_directory(f"{command}-{agent_name(config)}"), "--output")


def _check_free(path: Path) -> None:
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


def with_directory(config: TrainConfig) -> TrainConfig:
    """Return the configuration with the absolute path of its run's directory: the resumed one, or a new one; nothing is made.

    Raises:
        ConfigError: If the directory is taken, or there is no run to resume.
    """
    return changed(config, run_dir=_free_or_resumed(config)[0])


def _free_or_resumed(config: TrainConfig) -> tuple[Path, bool]:
    """The directory of a run, and whether it is that of one to resume."""
    resumed = resumed_run_dir(config)
    path = absolute_path(resumed or config.training.run_dir or default_directory(agent_name(config)))
    if resumed is None:
        _check_free(path)
    return path, resumed is not None


@contextmanager
def in_directory(config: TrainConfig) -> Iterator[TrainConfig]:
    """Make the run's directory and keep others from writing to it; yields the configuration that names it.

    Raises:
        ConfigError: If the directory is taken, another process writes to it, or there is no run to resume.
    """
    path, resumed = _free_or_resumed(config)
    named = resumed or config.training.run_dir is not None
    flag = "--resume" if config.training.resume not in ("", AUTO) else "--run-dir"
    with held_directory(path, flag) if named else held_new_directory(path) as path:
        if not resumed:
            _check_free(path)  # another run may have ended there since
        yield changed(config, run_dir=path)
