"""The demonstrations of a run in files: the tokens of each row, the places that predict trained ones, and the rows of each step."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.core.errors import LearnerError
from agentrl.core.types import IntArray, ints

COLUMNS = ("tokens", "reads")
ORDER = "order.npy"


def write_demonstrations(folder: Path, rows: Iterable[tuple[Any, Any]], order: Sequence[Sequence[int]]) -> None:
    """Write demonstrations into a folder, in the place of those that are there.

    Args:
        folder: The folder.
        rows: Tokens of each row # [L], and the places that predict trained ones # [A].
        order: Numbers of the rows of each step. # [steps, rows]
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, values in zip(COLUMNS, zip(*rows, strict=True), strict=True):
        np.save(folder / f"{name}.npy", np.concatenate([np.asarray(each, dtype=np.int32) for each in values]))
        np.save(folder / f"{name}-ends.npy", np.cumsum([len(each) for each in values]))
    np.save(folder / ORDER, np.asarray(order, dtype=np.int64))


class Demonstrations:
    """Demonstrations in a folder, which stay in their files until a step takes its rows.

    The order of all steps is written down, so that a run that is resumed or has other ranks takes the same rows in each step.

    Args:
        folder: Written by `write_demonstrations`, and seen by every rank.

    Raises:
        LearnerError: If it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._order = np.load(folder / ORDER)
            self._columns = {
                name: (np.load(folder / f"{name}.npy", mmap_mode="r"), np.load(folder / f"{name}-ends.npy")) for name in COLUMNS
            }
        except OSError as error:
            problem = f"the demonstrations of the run cannot be read from {folder}: {error}"
            raise LearnerError(f"{problem}. Ranks on several machines need a --run-dir that all of them see") from error

    def of_step(self, step: int) -> list[tuple[IntArray, IntArray]]:
        """Return the rows of a step, counted from 0: tokens # [L], and places that predict trained ones # [A]."""
        return [(self._values("tokens", number), self._values("reads", number)) for number in self._order[step].tolist()]

    def _values(self, name: str, number: int) -> IntArray:
        values, ends = self._columns[name]
        return ints(np.array(values[ends[number - 1] if number else 0 : ends[number]]))
