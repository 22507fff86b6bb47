"""Checkpoints of a run: the learner's state and the run's progress in one directory that is complete or not there.

RUN_DIR/checkpoints/step-00000020/
    learner/        written by the learner's ranks
    progress.json   accounts, cursor of the tasks, groups to repeat
    config.json     the settings the run had
    manifest.json   size and hash of every file
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio

from agentrl.core.errors import CheckpointError
from agentrl.core.files import check_directory, commit_directory, remove_directory, temporary_directory
from agentrl.core.protocols import Learner
from agentrl.flow.progress import Progress

FOLDER, LEARNER = "checkpoints", "learner"


class Checkpoints:
    """Writes the checkpoints of a run.

    Args:
        run_dir: Directory of the run; every learner rank must see it.
        learner: Writes its own part.
        every: Steps between two checkpoints, and then the last step has one in any case; 0: only where a run is stopped early.
        num_steps: Steps of the run.
        keep: Checkpoints to keep; older ones are removed after a newer is complete.
        config: The run's settings as JSON text.
    """

    def __init__(self, run_dir: Path, learner: Learner, *, every: int, num_steps: int, keep: int, config: str) -> None:
        self._folder, self._learner, self._config = (run_dir / FOLDER).absolute(), learner, config
        self._every, self._num_steps, self._keep = every, num_steps, keep

    def due(self, step: int) -> bool:
        """Return true if there is a checkpoint after `step` steps."""
        return self._every > 0 and (step % self._every == 0 or step == self._num_steps)

    @asynccontextmanager
    async def saving(self, progress: Progress) -> AsyncIterator[Path]:
        """Write a checkpoint; the body of the ``with`` runs when the learner's part is written, before the whole is complete.

        Yields:
            The directory that the checkpoint will have.

        Raises:
            CheckpointError: If it cannot be written; older ones are intact, and what was written of this one is gone.
        """
        target = self._folder / f"step-{progress.step:08d}"
        temporary = await asyncio.to_thread(temporary_directory, target)
        try:
            with _disk_errors(target):
                (temporary / LEARNER).mkdir()
            await self._learner.save_checkpoint(str(temporary / LEARNER), progress.step)
            yield target
            with anyio.CancelScope(shield=True):  # the thread would go on, with its files removed under its hands
                await asyncio.to_thread(self._complete, temporary, target, progress)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _complete(self, temporary: Path, target: Path, progress: Progress) -> None:
        with _disk_errors(target):
            (temporary / "progress.json").write_text(json.dumps(progress.to_json(), indent=2) + "\n", encoding="utf-8")
            (temporary / "config.json").write_text(self._config, encoding="utf-8")
        if target.exists():  # from before, and found damaged, or the run would not have taken this step again
            remove_directory(target)
        commit_directory(temporary, target)
        for old in _newest_first(self._folder)[self._keep :]:
            remove_directory(old)


@contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest checkpoint of a run that is complete by its manifest; damaged ones are passed over."""
    for path in _newest_first(run_dir / FOLDER):
        try:
            check_directory(path)
        except CheckpointError:
            continue
        return path.absolute()
    return None


def read_checkpoint(path: Path) -> tuple[Progress, dict[str, Any]]:
    """The progress and the settings that a checkpoint holds.

    Raises:
        CheckpointError: If they cannot be read.
    """
    try:
        progress = Progress.from_json(json.loads((path / "progress.json").read_text(encoding="utf-8")))
        config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    return progress, config


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True)
