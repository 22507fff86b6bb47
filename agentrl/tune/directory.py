"""The directory of a run: its settings, what it reads, its checkpoints, and the rows of metrics that stay when it goes on."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.core.errors import CheckpointError, ConfigError
from agentrl.core.files import TEMPORARY, check_directory, write_text
from agentrl.core.fingerprints import ACCEPT
from agentrl.core.paths import shown_path
from agentrl.resolve.inputs import changed_files, refuse_changed
from agentrl.resolve.ranks import holds_directory, is_first
from agentrl.resolve.saved import AUTO
from agentrl.track.html import curve, escaped, table
from agentrl.track.jsonl import encode, read_lines
from agentrl.track.text import counted

CHECKPOINTS = "checkpoints"
PREFIX = "checkpoint-"
INPUTS = "inputs.json"
METRICS = "metrics.jsonl"
EARLIER = "trainer_state.json"
"""File in checkpoints of the trainer of transformers, with which runs were trained before."""


def checkpoint_step(path: Path) -> int:
    """Return the step of a checkpoint's directory."""
    return int(path.name.removeprefix(PREFIX))


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the directories of checkpoints, complete or not, the oldest first."""
    return sorted((path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()), key=checkpoint_step)


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint that is complete; `None` if there is none."""
    for path in reversed(checkpoints_in(folder)):
        with contextlib.suppress(CheckpointError):
            check_directory(path)
            return path
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The end of a run: its directory, its model and its figures.

    Attributes:
        status: ``finished`` or ``interrupted``.
        run_dir: Directory of the run.
        model: The model with its tokenizer; an adapter with ``lora_rank``.
        steps: Steps done, those of earlier parts of the run included.
        metrics: The last row of ``metrics.jsonl``.
        summary: What ``summary.json`` holds.
    """

    status: str
    run_dir: Path
    model: Path
    steps: int
    metrics: Mapping[str, float]
    summary: Mapping[str, Any]

    def _repr_html_(self) -> str:
        """Return the loss by step, the last metrics, and the command that opens the viewer, for notebooks."""
        losses = [float(row["loss"]) for row in _metrics(self.run_dir) if row.get("loss") is not None]
        title = f"<b>Run {escaped(self.run_dir.name)}</b>: {escaped(self.status)}, {counted(self.steps, 'step')}"
        figures = table((), [(name, f"{value:.4g}") for name, value in self.metrics.items() if isinstance(value, int | float)])
        command = f"<code>agentrl view {escaped(shown_path(self.run_dir))}</code> shows it in the browser."
        return f"<div>{title}{curve(losses, name='loss')}{figures}<div>{command}</div></div>"

    @classmethod
    def read(cls, run_dir: Path) -> TuneResult:
        """Return the result of a run from its directory."""
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        return cls(
            status=summary["status"],
            run_dir=run_dir,
            model=run_dir / "model",
            steps=summary["steps"],
            metrics=next(reversed(_metrics(run_dir)), {}),
            summary=summary,
        )


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of a run, and where the run begins in it.

    Attributes:
        path: The directory.
        checkpoint: The checkpoint to go on from; `None` at the beginning of a run.
        rows: The rows of ``metrics.jsonl`` up to there.
    """

    path: Path
    checkpoint: Path | None
    rows: tuple[Mapping[str, Any], ...]

    @property
    def step(self) -> int:
        """Steps done."""
        return checkpoint_step(self.checkpoint) if self.checkpoint else 0

    def tidy(self) -> None:
        """Remove checkpoints that a run which was killed had only begun to write or to remove, and those that do not count."""
        folder = self.path / CHECKPOINTS
        later = [path for path in checkpoints_in(folder) if checkpoint_step(path) > self.step]
        for path in (*folder.glob(f".*{TEMPORARY}"), *later):
            shutil.rmtree(path, ignore_errors=True)

    def check_inputs(self, inputs: Mapping[str, Any], *, accepts_changes: bool) -> None:
        """Note what the run reads, or compare it with what an earlier part noted.

        Args:
            inputs: The hash of its ``rows``, and the fingerprints of the files of ``data``, and of ``files`` of models and a template.
            accepts_changes: It may go on with other rows.

        Raises:
            ConfigError: If the run goes on with other models or rows than it began with.
        """
        path, name = self.path / INPUTS, shown_path(self.path)
        if self.checkpoint is not None and path.is_file():
            before = json.loads(path.read_text(encoding="utf-8"))
            refuse_changed(before["files"], inputs["files"], name, remedy="Restore them, or start a new run.")
            if before["rows"] != inputs["rows"] and not accepts_changes:
                changed = ", ".join(changed_files(before["data"], inputs["data"]))
                problem = "goes on with other rows than it began with" + (f": {changed}" if changed else "")
                raise ConfigError("--resume", name, problem, f"Restore the data, or go on with what is there now: add {ACCEPT}.")
        if is_first():
            write_text(path, json.dumps(inputs) + "\n")


def open_directory(path: Path, resume: str, settings: str) -> RunDirectory:
    """Make the directory of a run, or find where it goes on; the first rank writes.

    Args:
        path: The directory.
        resume: ``--resume``.
        settings: The text of ``config.json``.

    Raises:
        ConfigError: If it holds another run, cannot be written to, or there is nothing to go on from.
    """
    checkpoint = latest_checkpoint(path / CHECKPOINTS) if resume and (path / "config.json").is_file() else None
    if checkpoint is not None and (checkpoint / EARLIER).is_file():
        weights = shown_path(path / "model" if (path / "model").is_dir() else checkpoint)
        problem = "is a run of an earlier version, whose checkpoints another trainer wrote"
        remedy = f"Begin a new run with --config {shown_path(path / 'config.json')} --model {weights} and another --run-dir."
        raise ConfigError("--resume", shown_path(path), problem, remedy)
    if checkpoint is None and resume not in ("", AUTO):
        raise ConfigError("--resume", resume, "holds no complete checkpoint", "Start it again without --resume, with --save-every N.")
    if checkpoint is None and not resume and (path / METRICS).exists() and is_first():
        raise ConfigError("--run-dir", shown_path(path), "already holds a run", "Choose another directory, or continue it with --resume.")
    try:
        (path / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        if holds_directory():
            write_text(path / "config.json", settings + "\n")
    except OSError as error:
        raise ConfigError("--run-dir", str(path), f"cannot be written to: {error.strerror}", "Name another directory.") from error
    # Later steps will happen again.
    step = checkpoint_step(checkpoint) if checkpoint else -1
    rows = [row for row in _metrics(path) if row["step"] <= step]
    if is_first() and (path / METRICS).exists():
        write_text(path / METRICS, "".join(encode(row) + "\n" for row in rows))
    return RunDirectory(path, checkpoint, tuple(rows))


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    return read_lines(run_dir / METRICS) if (run_dir / METRICS).exists() else []
