"""Checkpoints of a run as they are written: complete or not there, the newest kept, each copied elsewhere where that is wanted."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio

from agentrl.core.disk import directory_bytes, free_bytes, full_text, write_problem
from agentrl.core.errors import CheckpointError
from agentrl.core.files import commit_directory, remove_directory, temporary_directory
from agentrl.core.manifest import FileEntry
from agentrl.core.protocols import Learner
from agentrl.flow.checkpoint import CONFIG, FOLDER, INPUTS, LEARNER, PREFIX, PROGRESS, Progress, newest_first
from agentrl.flow.uploads import Uploads

CANCELLED_WRITE_S = 8.0
"""Seconds that a run which is cancelled waits for the learner to end the write that it has begun."""

ALIKE = 0.95
"""Share of the size of the checkpoint before that another one takes at least."""


class Checkpoints:
    """Writes the checkpoints of a run into its directory, which every learner rank must see.

    There is one after each `every` steps, and then after the last step in any case; 0: only where a run is stopped early. The newest
    `keep` are kept; older ones are removed after a newer is complete. `config` holds the run's settings and `inputs` the manifest of what
    it reads, as JSON texts. With `uploads`, each is copied elsewhere when it is complete, and one that is being copied is kept until that
    is over.
    """

    def __init__(
        self,
        run_dir: Path,
        learner: Learner,
        *,
        every: int,
        num_steps: int,
        keep: int,
        config: str,
        inputs: str = "{}",
        uploads: Uploads | None = None,
    ) -> None:
        # Absolute, because user code may change the working directory while the run goes on.
        self._folder, self._learner, self._config, self._inputs = (run_dir / FOLDER).absolute(), learner, config, inputs
        self._every, self._num_steps, self._keep, self._uploads = every, num_steps, keep, uploads
        self._tidying = threading.Lock()  # held while old directories are removed, which two threads may do

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the copies; empty without any."""
        return self._uploads.metrics() if self._uploads else {}

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
        target = self._folder / f"{PREFIX}{progress.step:08d}"
        temporary = await asyncio.to_thread(self._begin, target)
        try:
            await asyncio.to_thread(self._check_room, target)
            with _disk_errors(target):
                (temporary / LEARNER).mkdir()
            await self._write(temporary / LEARNER, progress.step)
            yield target
            with anyio.CancelScope(shield=True):  # the threads would go on, with their files removed under their hands
                flushed = await self._learner.flush_checkpoint(str(temporary / LEARNER))
                await asyncio.to_thread(self._complete, temporary, target, progress, flushed)
                if self._uploads:
                    self._uploads.offer(target)
                await asyncio.to_thread(self.remove_old)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    async def _write(self, folder: Path, step: int) -> None:
        """Have the learner write its part; if the run is cancelled meanwhile, its files must not come after the folder was removed."""
        writing = asyncio.ensure_future(self._learner.save_checkpoint(str(folder), step))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            with anyio.move_on_after(CANCELLED_WRITE_S, shield=True):
                await asyncio.gather(writing, return_exceptions=True)
            raise

    def _check_room(self, target: Path) -> None:
        """Refuse to begin a checkpoint that has less room than the one before it took.

        Raises:
            CheckpointError: With the file system, what is free and what is needed.
        """
        needed = next((directory_bytes(path) for path in newest_first(self._folder)), 0)
        if needed * ALIKE > free_bytes(self._folder):
            said = os.strerror(errno.ENOSPC)
            raise CheckpointError(f"{target} cannot be written: {full_text(self._folder, needed)} ({said})")

    def _begin(self, target: Path) -> Path:
        # `temporary_directory` removes what it finds half done, which `remove_old` may be removing on another thread.
        with self._tidying:
            return temporary_directory(target)

    def _complete(self, temporary: Path, target: Path, progress: Progress, flushed: Mapping[str, FileEntry]) -> None:
        with _disk_errors(target):
            (temporary / PROGRESS).write_text(json.dumps(progress.to_json(), indent=2) + "\n", encoding="utf-8")
            (temporary / CONFIG).write_text(self._config, encoding="utf-8")
            (temporary / INPUTS).write_text(self._inputs + "\n", encoding="utf-8")
        if target.exists():  # from before, and found damaged, or the run would not have taken this step again
            remove_directory(target)
        commit_directory(temporary, target, {f"{LEARNER}/{name}": entry for name, entry in flushed.items()})

    def remove_old(self) -> None:
        """Remove checkpoints beyond the newest, but none that is being copied elsewhere or waits for it."""
        held = self._uploads.held if self._uploads else ()
        with self._tidying:
            for old in newest_first(self._folder)[self._keep :]:
                if old not in held:
                    remove_directory(old)


@contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {write_problem(error, target.parent)}") from error
