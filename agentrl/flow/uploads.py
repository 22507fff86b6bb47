"""Copies of complete checkpoints at an address: made in the background, found again, and fetched.

ADDRESS/step-00000020/ has the files of the checkpoint; ``manifest.json`` arrives last, so a directory without one is not complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.core.errors import AgentRLError, CheckpointError
from agentrl.core.files import commit_directory, remove_directory, temporary_directory
from agentrl.core.manifest import MANIFEST, FileEntry, manifest_text, read_manifest
from agentrl.core.process import on_thread
from agentrl.core.protocols import Learner
from agentrl.core.remote import get_files, manifest_at, names_at, put_files, put_text, remove_at
from agentrl.flow.checkpoint import CONFIG, FOLDER, LEARNER, PREFIX, PROGRESS, Progress, is_own, learner_files, parse_checkpoint

_log = logging.getLogger(__name__)

UPLOAD_TIMEOUT_S = 1800.0
"""Seconds that one copy may take, and that the end of a run waits for the last one."""


class Uploads:
    """Copies checkpoints to an address, one at a time, while the run goes on.

    One checkpoint may wait while another is copied; a newer one takes its place, so that a slow address delays nothing. The `keep` newest
    copies are kept. A copy that fails is told to `warn`, and counted; the next checkpoint is tried again.
    """

    def __init__(
        self, address: str, learner: Learner, *, keep: int, timeout_s: float = UPLOAD_TIMEOUT_S, warn: Callable[[str], None] = _log.warning
    ) -> None:
        self.address = address
        self._learner, self._keep, self._timeout_s, self._warn = learner, keep, timeout_s, warn
        self._waiting: Path | None = None
        self._current: Path | None = None
        self._last: Path | None = None
        self._changed = asyncio.Event()
        self._problem = ""
        self._step = self._seconds = self._bytes = 0.0
        self._failures = self._skipped = 0

    @property
    def held(self) -> tuple[Path, ...]:
        """Checkpoints that are copied or wait for it."""
        return tuple(path for path in (self._current, self._waiting) if path is not None)

    def offer(self, path: Path) -> None:
        """Have a complete checkpoint copied after the one that is copied now."""
        self._skipped += self._waiting is not None
        self._waiting = self._last = path
        self._changed.set()

    def metrics(self) -> dict[str, float]:
        """Return how far the copies are."""
        return {
            "checkpoint/uploaded_step": self._step,
            "checkpoint/upload_s": self._seconds,
            "checkpoint/upload_gb": self._bytes / 1e9,
            "checkpoint/upload_failures": float(self._failures),
            "checkpoint/uploads_skipped": float(self._skipped),
        }

    async def run(self, after: Callable[[], None] = lambda: None) -> None:
        """Copy what is offered, for ever, and call `after` each time.

        Consumes offered checkpoints. Produces copies. Waits for an offer, and for each copy at most the deadline. Unblocked by `offer`;
        cancelled when the run is over.
        """
        while True:
            while self._waiting is None:
                self._changed.clear()
                await self._changed.wait()
            self._current, self._waiting = self._waiting, None
            try:
                await self._copy(self._current)
            finally:
                self._current = None
                # Wakes `finish`, which waits until nothing is held any more.
                self._changed.set()
            # What cannot be tidied up now is tried again after the next copy.
            with contextlib.suppress(OSError):
                await asyncio.to_thread(after)

    async def finish(self, timeout_s: float) -> None:
        """Wait until the last checkpoint is copied; `run` has to go on meanwhile.

        Raises:
            CheckpointError: If it could not be copied, or not in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self.held:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self._problem = f"it took longer than {timeout_s:.0f} s"
        if self._last is not None and self._problem:
            raise CheckpointError(
                f"the last checkpoint could not be copied to {self.address}: {self._problem}. It is complete in {self._last}; "
                "resume the run to copy it again, or copy the folder by hand, its manifest.json last"
            )

    async def _copy(self, path: Path) -> None:
        begin = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                size = await send_copy(path, self.address, self._learner, self._keep)
        except Exception as error:  # whatever a file system raises, training goes on
            self._problem = _shown(error, self._timeout_s)
            self._failures += 1
            self._warn(f"the checkpoint of step {step_of(path)} was not copied to {self.address}: {self._problem}")
        else:
            # A later copy makes good for those that failed before: only the last one decides how the run ends.
            self._problem = ""
            self._step, self._seconds, self._bytes = float(step_of(path)), time.monotonic() - begin, float(size)


def _shown(error: BaseException, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"it took longer than {timeout_s:g} s"
    return str(error) if isinstance(error, AgentRLError) else f"{type(error).__name__}: {error}"


def step_of(path: Path | str) -> int:
    """Return the step of a checkpoint, from its name."""
    return int(str(path).rpartition(PREFIX)[2])


async def send_copy(path: Path, address: str, learner: Learner, keep: int) -> int:
    """Copy a complete checkpoint to an address, its manifest last, remove copies beyond the `keep` newest, and return the bytes copied.

    The ranks copy the learner's files.

    Raises:
        CheckpointError: If the checkpoint cannot be read, or a file cannot be copied.
    """
    files, target = read_manifest(path), f"{address}/{path.name}"
    size = 0
    # A run that is resumed offers its last checkpoint again, which may have arrived already.
    if await on_thread(manifest_at, target) != files:
        size += sum(await learner.map_files(put_files, learner_files(files), str(path), target))
        # Not `asyncio.to_thread`, whose threads are waited for at exit: a transfer that hangs would keep the process alive.
        size += await on_thread(put_files, {name: entry for name, entry in files.items() if is_own(name)}, path, target)
        await on_thread(put_text, target, MANIFEST, manifest_text(files))
    await on_thread(_remove_old, address, keep)
    return size


def _remove_old(address: str, keep: int) -> None:
    """Remove complete copies beyond the newest, and incomplete ones that are older than a complete one."""
    complete = 0
    for name in names_at(address, PREFIX):
        if complete < keep and manifest_at(f"{address}/{name}") is not None:
            complete += 1
        elif complete:
            remove_at(f"{address}/{name}")


@dataclass(frozen=True, slots=True)
class CheckpointCopy:
    """A complete copy of a checkpoint at an address."""

    address: str  # of the copy itself
    files: dict[str, FileEntry]

    @property
    def step(self) -> int:
        """Steps done by then."""
        return step_of(self.address)


def find_copy(address: str) -> CheckpointCopy | None:
    """Return the newest complete copy at an address, which may also be that of one copy; `None` if there is none.

    Raises:
        CheckpointError: If the address cannot be read.
    """
    parent, _, name = address.rpartition("/")
    places = [(parent, name)] if name.startswith(PREFIX) else [(address, name) for name in names_at(address, PREFIX)]
    for folder, name in places:
        files = manifest_at(f"{folder}/{name}")
        if files is not None:
            return CheckpointCopy(f"{folder}/{name}", files)
    return None


def read_copy(copy: CheckpointCopy) -> tuple[Progress, dict[str, Any], dict[str, str]]:
    """Return progress and settings of a copy, and the texts of their files; the learner's files are not read.

    Raises:
        CheckpointError: If they cannot be read, or are not what the manifest says.
    """
    own = {name: entry for name, entry in copy.files.items() if is_own(name)}
    with tempfile.TemporaryDirectory(prefix="agentrl-") as folder:
        get_files(own, copy.address, folder)
        texts = {name: Path(folder, name).read_text(encoding="utf-8") for name in own}
    try:
        return *parse_checkpoint(texts[PROGRESS], texts[CONFIG]), texts
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{copy.address} cannot be read: {type(error).__name__}: {error}") from error


async def fetch_copy(copy: CheckpointCopy, run_dir: Path, learner: Learner) -> Path:
    """Make a copy a checkpoint of the run in `run_dir`, which every rank sees, and return it; the ranks fetch the learner's files.

    Raises:
        CheckpointError: If a file cannot be fetched, or is not what the manifest says; then nothing is left of it.
    """
    target = _place(copy, run_dir)
    temporary = await asyncio.to_thread(temporary_directory, target)
    try:
        (temporary / LEARNER).mkdir()
        await learner.map_files(get_files, learner_files(copy.files), copy.address, str(temporary))
        await on_thread(get_files, {name: entry for name, entry in copy.files.items() if is_own(name)}, copy.address, temporary)
        await asyncio.to_thread(_commit, temporary, target, copy.files)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _place(copy: CheckpointCopy, run_dir: Path) -> Path:
    return run_dir.absolute() / FOLDER / f"{PREFIX}{copy.step:08d}"


def _commit(temporary: Path, target: Path, files: Mapping[str, FileEntry]) -> None:
    if target.exists():  # damaged, or it would have been taken
        remove_directory(target)
    commit_directory(temporary, target, files)
