"""The rows of a data set as arrays, a few per column, which are kept in files and read from there without being loaded whole."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
"""Columns of one training row, of which `agentrl.tune.learner_rows.RowMaker` makes rows for the learner."""


class Rows(Sequence[Row]):
    """Rows that are made when they are asked for."""

    def row(self, place: int) -> Row:
        """Return the row at a place from 0 on."""
        raise NotImplementedError

    def __getitem__(self, place: Any) -> Any:
        """Return a row, or those of a slice."""
        places = range(len(self))[place]
        return [*map(self.row, places)] if isinstance(places, range) else self.row(places)


class RowTable(Rows):
    """Rows whose columns are lists of numbers, or single numbers.

    Args:
        columns: Name -> the values of all rows, and where the list of each row begins; `None` in its place for single values.
    """

    def __init__(self, columns: Mapping[str, tuple[Any, Any]]) -> None:
        self._columns = dict(columns)
        self._length = next((len(values) if begins is None else len(begins) - 1 for values, begins in columns.values()), 0)

    def __len__(self) -> int:
        return self._length

    def row(self, place: int) -> Row:
        """Return the row at a place from 0 on."""
        return {name: numbers.tolist() for name, numbers in self.arrays(place).items()}

    def arrays(self, place: int) -> Mapping[str, Any]:
        """Return the row at a place from 0 on with its numbers in arrays."""
        return {
            name: values[place] if begins is None else values[begins[place] : begins[place + 1]]
            for name, (values, begins) in self._columns.items()
        }

    def write(self, folder: Path) -> None:
        """Write the table into a new folder."""
        folder.mkdir()
        np.savez(folder / "begins.npz", **{name: begins for name, (_, begins) in self._columns.items() if begins is not None})
        for name, (values, _) in self._columns.items():
            np.save(folder / f"{name}.npy", values)

    @classmethod
    def read(cls, folder: Path) -> RowTable:
        """Return the table in a folder; its values stay in the files until they are asked for."""
        with np.load(folder / "begins.npz") as begins:
            return cls({path.stem: (np.load(path, mmap_mode="r"), begins.get(path.stem)) for path in folder.glob("*.npy")})


def _column(values: Sequence[Any]) -> tuple[Any, Any]:
    """Return the values of a column in one array, and where those of each row begin."""
    if not isinstance(values[0], list | array):
        return np.array(values), None
    begins = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum([len(each) for each in values], out=begins[1:])
    return _flat(values), begins


def _flat(lists: Sequence[list[Any] | array[Any]]) -> Any:
    """Return the numbers of lists in one array: whole ones unless there are fractions."""
    parts = [np.asarray(each) for each in lists if len(each)]  # NumPy takes an empty list for one of fractions
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def as_rows(rows: Sequence[Row]) -> Sequence[Row]:
    """Return rows as a table, or one by one if some have columns of their own or images, which are no numbers."""
    if all(row.keys() == rows[0].keys() and "images" not in row for row in rows):
        return RowTable({name: _column([row[name] for row in rows]) for name in (rows[0] if rows else ())})
    return tuple({name: value.tolist() if isinstance(value, array) else value for name, value in row.items()} for row in rows)


class Drawn(Rows):
    """Rows in the order in which they are drawn from parts that follow each other."""

    def __init__(self, parts: Sequence[Sequence[Row]], order: Sequence[int]) -> None:
        self._places = [(part, place) for part, rows in enumerate(parts) for place in range(len(rows))] if len(parts) > 1 else None
        self._parts, self._order = parts, order

    def __len__(self) -> int:
        return len(self._order)

    def row(self, place: int) -> Row:
        """Return the row that is drawn at a place from 0 on."""
        part, index = (0, self._order[place]) if self._places is None else self._places[self._order[place]]
        return self._parts[part][index]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The rows of a run as token ids.

    Attributes:
        parts: Rows to train on, by source.
        held_out: Rows to evaluate on.
        counts: What became of the examples, for training and evaluation.
        samples: A few rows as text.
        ends: Tokens that end answers and texts, the most frequent first.
        notes: What a person is told of the sources.
        fingerprint: Hash of the rows.
    """

    parts: tuple[Sequence[Row], ...]
    held_out: Sequence[Row]
    counts: Mapping[str, Mapping[str, int]]
    samples: Sequence[str]
    ends: Sequence[int] = ()
    notes: Sequence[str] = ()
    fingerprint: str = ""

    @property
    def sizes(self) -> list[int]:
        """Numbers of rows to train on, by source."""
        return [len(part) for part in self.parts]


def fingerprint(*parts: Iterable[Mapping[str, Any]]) -> str:
    """Return a hash of the contents of rows, by which a resumed run knows its data; the same for a table as for its rows."""
    digest = hashlib.sha256()
    for row in itertools.chain.from_iterable(map(part.arrays, range(len(part))) if isinstance(part, RowTable) else part for part in parts):
        for name in sorted(row):
            value = row[name]
            digest.update(name.encode())
            digest.update("".join(value).encode() if name == "images" else np.asarray(value, dtype=np.float64).tobytes())
    return digest.hexdigest()
