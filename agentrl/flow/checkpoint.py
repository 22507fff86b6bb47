"""Progress of a run between two steps, its checkpoints, and the continuation from there.

RUN_DIR/checkpoints/step-00000020/
    learner/        written by the learner's ranks
    progress.json   accounts, cursor of the tasks, groups to repeat
    config.json     the settings the run had
    inputs.json     what it read by path or name, as fingerprints
    manifest.json   size and hash of every file

The learner's ranks hash what they wrote, and look at it again before they load it; this process hashes the other files only.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentrl.core.errors import CheckpointError, DamagedCheckpointError
from agentrl.core.files import check_directory
from agentrl.core.manifest import MANIFEST, FileEntry, differing_files, read_manifest
from agentrl.core.protocols import Learner
from agentrl.core.types import Task
from agentrl.env.tasks import TaskSource


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
    forked: int = 0  # episodes of the groups trained on that began at a turn of another one
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
    # Tasks may be an endless iterable, which can only be read in order: closed groups on the way are passed over.
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


FOLDER, LEARNER = "checkpoints", "learner"
PROGRESS, CONFIG, INPUTS, PREFIX = "progress.json", "config.json", "inputs.json", "step-"


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
    # The new name does not begin with `PREFIX`, so `newest_first` passes the folder over.
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


def read_inputs(path: Path) -> dict[str, Any]:
    """Return the manifest of inputs in a checkpoint or a run's directory; empty if an earlier version wrote it."""
    try:
        found: dict[str, Any] = json.loads((path / INPUTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first, complete or not."""
    # Steps are padded with zeros, so the order of the names is that of the steps.
    return sorted(folder.glob(f"{PREFIX}*"), reverse=True)
