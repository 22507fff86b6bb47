"""Progress of a run between two steps, its checkpoints, and the continuation from there.

RUN_DIR/checkpoints/step-00000020/
    learner/        written by the learner's ranks
    progress.json   accounts, cursor of the tasks, groups to repeat
    config.json     the settings the run had
    manifest.json   size and hash of every file

The learner's ranks hash what they wrote, and look at it again before they load it; this process hashes the other files only.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from agentrl.core.errors import CheckpointError, DamagedCheckpointError
from agentrl.core.files import check_directory, commit_directory, remove_directory, temporary_directory
from agentrl.core.manifest import MANIFEST, FileEntry, differing_files, read_manifest
from agentrl.core.protocols import Learner
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import Task, Ticket
from agentrl.env.tasks import TaskSource

if TYPE_CHECKING:
    from agentrl.flow.uploads import Uploads


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The accounts of a run after a step."""

    step: int = 0  # steps done, which is the version of the weights
    next_group_id: int = 0  # id of the first group never admitted
    epoch: int = 0  # cursor of the tasks: the epoch of the first task never admitted
    position: int = 0  # its place in the epoch
    open_groups: tuple[tuple[int, int, int], ...] = ()  # group id, epoch and position of the admitted groups that are in flight
    trained: int = 0  # groups trained on
    filtered: Mapping[str, int] = field(default_factory=dict)  # reason -> groups
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason -> groups
    elapsed_s: float = 0.0  # time the run has taken
    sampling: Mapping[str, Any] = field(default_factory=dict)  # state of the sampler, where tasks are drawn by pass rates
    score_moments: Mapping[str, Any] = field(default_factory=dict)  # state of the running moments of reward models' scores

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Progress:
        """The inverse of `to_json`.

        Raises:
            TypeError: If a key is missing or unknown.
        """
        groups = tuple((int(group), int(epoch), int(position)) for group, epoch, position in data["open_groups"])
        return cls(**{**data, "open_groups": groups})


def repeated_tasks(tasks: TaskSource, progress: Progress) -> list[tuple[int, Task]]:
    """The open groups with their tasks, in order of admission; afterwards the next draw gives the first task never admitted."""
    if tasks.sampler is not None:
        tasks.sampler.restore(progress.sampling)
        return [(group_id, tasks.at(position, epoch)) for group_id, epoch, position in sorted(progress.open_groups)]
    places = {(epoch, position): group_id for group_id, epoch, position in progress.open_groups}
    epoch, position = min([*places, (progress.epoch, progress.position)])
    tasks.restore({"epoch": epoch, "position": position})
    found: list[tuple[int, Task]] = []
    while len(found) < len(places):
        task = tasks.draw()
        group_id = places.get((task.epoch, task.position))
        if group_id is not None:
            found.append((group_id, task))
    tasks.restore({"epoch": progress.epoch, "position": progress.position})
    return found


class Admissions:
    """Hands out the tasks with their group ids: first the open groups of a resumed run, by growing id, then new ones.

    Sampling seeds depend on task and epoch, not on time, so a repeated group is sampled as it would have been.
    """

    def __init__(self, tasks: Iterator[Task], progress: Progress, repeat: Sequence[tuple[int, Task]] = ()) -> None:
        self._tasks, self._repeat = tasks, deque(repeat)
        self._sampler = tasks.sampler if isinstance(tasks, TaskSource) else None
        self._next_id, self._cursor = progress.next_group_id, (progress.epoch, progress.position)
        self._places = {group_id: (epoch, position) for group_id, epoch, position in progress.open_groups}

    @property
    def next_id(self) -> int:
        """Id of the group that the next task makes."""
        return self._repeat[0][0] if self._repeat else self._next_id

    def draw(self) -> Task | None:
        """The task of group `next_id`; `None` when there is none left."""
        if self._repeat:
            return self._repeat.popleft()[1]
        task = next(self._tasks, None)
        if task is not None:
            self._places[self._next_id] = (task.epoch, task.position)
            self._next_id, self._cursor = self._next_id + 1, (task.epoch, task.position + 1)
        return task

    def closed(self, ticket: Ticket, summary: GroupSummary) -> None:
        """Tell the sampler how a group went, once, when it is trained on or filtered; one that is run again is not closed before."""
        if self._sampler is not None:
            scores = [member.score for member in summary.trainable if member.score is not None]
            self._sampler.outcome(ticket.task.position, ticket.group_id, scores)

    def step_done(self) -> dict[str, float]:
        """Let the sampler draw by all that is known after a step, and return its metrics."""
        if self._sampler is None:
            return {}
        self._sampler.begin_round()
        return self._sampler.metrics()

    def progress(self, *, step: int, in_flight: set[int], **accounts: Any) -> Progress:
        """Return the progress of the run; `accounts` are the other attributes of `Progress`."""
        is_open = in_flight | {group_id for group_id, _ in self._repeat}
        self._places = {group_id: place for group_id, place in self._places.items() if group_id in is_open}
        groups = tuple((group_id, *place) for group_id, place in self._places.items())
        epoch, position = self._cursor
        accounts["sampling"] = {} if self._sampler is None else self._sampler.state()
        return Progress(step=step, next_group_id=self._next_id, epoch=epoch, position=position, open_groups=groups, **accounts)


FOLDER, LEARNER = "checkpoints", "learner"
PROGRESS, CONFIG, PREFIX = "progress.json", "config.json", "step-"
CANCELLED_WRITE_S = 8.0
"""Seconds that a run which is cancelled waits for the learner to end the write that it has begun."""


class Checkpoints:
    """Writes the checkpoints of a run into its directory, which every learner rank must see.

    There is one after each `every` steps, and then after the last step in any case; 0: only where a run is stopped early. The newest
    `keep` are kept; older ones are removed after a newer is complete. `config` holds the run's settings as JSON text. With `uploads`,
    each is copied elsewhere when it is complete, and one that is being copied is kept until that is over.
    """

    def __init__(
        self, run_dir: Path, learner: Learner, *, every: int, num_steps: int, keep: int, config: str, uploads: Uploads | None = None
    ) -> None:
        self._folder, self._learner, self._config = (run_dir / FOLDER).absolute(), learner, config
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
            with _disk_errors(target):
                (temporary / LEARNER).mkdir()
            await self._write(temporary / LEARNER, progress.step)
            yield target
            with anyio.CancelScope(shield=True):  # the threads would go on, with their files removed under their hands
                sealed = await self._learner.seal_checkpoint(str(temporary / LEARNER))
                await asyncio.to_thread(self._complete, temporary, target, progress, sealed)
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

    def _begin(self, target: Path) -> Path:
        with self._tidying:
            return temporary_directory(target)

    def _complete(self, temporary: Path, target: Path, progress: Progress, sealed: Mapping[str, FileEntry]) -> None:
        with _disk_errors(target):
            (temporary / PROGRESS).write_text(json.dumps(progress.to_json(), indent=2) + "\n", encoding="utf-8")
            (temporary / CONFIG).write_text(self._config, encoding="utf-8")
        if target.exists():  # from before, and found damaged, or the run would not have taken this step again
            remove_directory(target)
        commit_directory(temporary, target, {f"{LEARNER}/{name}": entry for name, entry in sealed.items()})

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
        raise CheckpointError(f"{target} cannot be written: {error}") from error


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest checkpoint of a run that is complete by its manifest; damaged ones are passed over.

    The hashes of the learner's files are left to its ranks, see `check_learner_files`.
    """
    for path in newest_first(run_dir / FOLDER):
        try:
            check_directory(path, hashed=is_own)
        except CheckpointError:
            continue
        return path.absolute()
    return None


async def check_learner_files(path: Path, learner: Learner) -> None:
    """Let the ranks compare the learner's part of a checkpoint with the manifest; one that differs is renamed and never read again.

    Raises:
        DamagedCheckpointError: If a file differs.
    """
    answers = await learner.map_files(differing_files, learner_files(read_manifest(path)), str(path))
    if wrong := sorted(name for names in answers for name in names):
        aside = await asyncio.to_thread(_set_aside, path)
        raise DamagedCheckpointError(f"{path / wrong[0]} is not what {MANIFEST} says: it was cut off or changed; now in {aside}")


def _set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, in the place of one that was damaged before."""
    aside = path.with_name(f"damaged-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    return aside


def is_own(name: str) -> bool:
    """Return true for the files of a checkpoint that the driver writes and reads."""
    return not name.startswith(f"{LEARNER}/")


def learner_files(files: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
    """Return the entries of a manifest that are the learner's."""
    return {name: entry for name, entry in files.items() if not is_own(name)}


def read_checkpoint(path: Path) -> tuple[Progress, dict[str, Any]]:
    """The progress and the settings that a checkpoint holds.

    Raises:
        CheckpointError: If they cannot be read.
    """
    try:
        return parse_checkpoint(*((path / name).read_text(encoding="utf-8") for name in (PROGRESS, CONFIG)))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def parse_checkpoint(progress: str, config: str) -> tuple[Progress, dict[str, Any]]:
    """Return the progress and the settings from the texts of their files.

    Raises:
        ValueError: If one is not JSON; `TypeError` or `KeyError` if it is of another form.
    """
    settings: dict[str, Any] = json.loads(config)
    return Progress.from_json(json.loads(progress)), settings


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first, complete or not."""
    return sorted(folder.glob(f"{PREFIX}*"), reverse=True)
