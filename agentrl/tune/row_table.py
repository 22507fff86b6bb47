"""The rows of a data set as arrays, a few per column, which are kept in files and read from there without being loaded whole."""

from __future__ import annotations

import hashlib
import itertools
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

Row = dict[str, Any]
"""Columns of one training row, of which `agentrl.tune.learner_rows.RowMaker` makes rows for the learner."""


class RowTable(Sequence[Row]):
    """Rows whose columns are lists of numbers, or single numbers.

    Args:
        columns: Name -> the values of all rows, and where the list of each row begins; `None` in its place for single values.
        length: Number of rows.
    """

    def __init__(self, columns: Mapping[str, tuple[Any, Any]], length: int) -> None:
        self._columns, self._length = dict(columns), length

    @classmethod
    def of(cls, rows: Sequence[Row]) -> RowTable:
        """Return rows, which all have the same columns, as a table."""
        names = list(rows[0]) if rows else []
        return cls({name: _column([row[name] for row in rows]) for name in names}, len(rows))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> Row: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Row]: ...

    def __getitem__(self, place: int | slice) -> Row | Sequence[Row]:
        """Return a row, or several."""
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(self._length))]
        if not -self._length <= place < self._length:
            raise IndexError(place)
        place %= self._length
        return {
            name: (values[place] if begins is None else values[begins[place] : begins[place + 1]]).tolist()
            for name, (values, begins) in self._columns.items()
        }

    def __iter__(self) -> Iterator[Row]:
        return (self[place] for place in range(self._length))

    def arrays(self) -> Iterator[Mapping[str, Any]]:
        """Yield the rows with their numbers in arrays."""
        for place in range(self._length):
            yield {
                name: values[place] if begins is None else values[begins[place] : begins[place + 1]]
                for name, (values, begins) in self._columns.items()
            }

    def write(self, folder: Path) -> None:
        """Write the table into a new folder."""
        folder.mkdir()
        for number, (values, begins) in enumerate(self._columns.values()):
            np.save(folder / f"{number}.npy", values)
            if begins is not None:
                np.save(folder / f"{number}-begins.npy", begins)
        (folder / "rows.json").write_text(json.dumps({"length": self._length, "columns": list(self._columns)}), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> RowTable:
        """Return the table in a folder; its values stay in the files until they are asked for."""
        about = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
        columns = {}
        for number, name in enumerate(about["columns"]):
            begins = folder / f"{number}-begins.npy"
            values = np.load(folder / f"{number}.npy", mmap_mode="r")
            columns[name] = values, np.load(begins) if begins.exists() else None
        return cls(columns, about["length"])


def _column(values: Sequence[Any]) -> tuple[Any, Any]:
    """Return the values of a column in one array, and where those of each row begin."""
    if not isinstance(values[0], list | array):
        return np.array(values), None
    begins = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum([len(each) for each in values], out=begins[1:])
    return _flat(values), begins


def _flat(lists: Sequence[list[Any] | array[Any]]) -> Any:
    """Return the numbers of lists in one array: whole ones unless there are fractions."""
    flat: Any = array("i")  # takes lists of numbers twice as fast as NumPy does
    # An array of whole numbers refuses fractions, so they are found without a look at each number.
    try:
        for each in lists:
            flat.extend(each) if isinstance(each, array) else flat.fromlist(each)
    except TypeError:
        flat = array("d")
        for each in lists:
            flat.fromlist(list(each))
    return np.asarray(flat)


def as_rows(rows: Sequence[Row]) -> Sequence[Row]:
    """Return rows as a table, or one by one if some have columns of their own or images, which are no numbers."""
    same = all(row.keys() == rows[0].keys() and "images" not in row for row in rows)
    return RowTable.of(rows) if same else tuple(map(_with_lists, rows))


def _with_lists(row: Row) -> Row:
    return {name: value.tolist() if isinstance(value, array) else value for name, value in row.items()}


class Drawn(Sequence[Row]):
    """Rows in the order in which they are drawn from parts that follow each other."""

    def __init__(self, parts: Sequence[Sequence[Row]], order: Sequence[int]) -> None:
        self._places = [(part, place) for part, rows in enumerate(parts) for place in range(len(rows))] if len(parts) > 1 else None
        self._parts, self._order = parts, order

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, place: int) -> Row: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Row]: ...

    def __getitem__(self, place: int | slice) -> Row | Sequence[Row]:
        """Return a row, or several."""
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        part, index = (0, self._order[place]) if self._places is None else self._places[self._order[place]]
        return self._parts[part][index]


def fingerprint(*parts: Iterable[Mapping[str, Any]]) -> str:
    """Return a hash of the contents of rows, by which a resumed run knows its data; the same for a table as for its rows."""
    digest = hashlib.sha256()
    for row in itertools.chain.from_iterable(part.arrays() if isinstance(part, RowTable) else part for part in parts):
        for name in sorted(row):
            value = row[name]
            digest.update(name.encode())
            digest.update("".join(value).encode() if name == "images" else np.asarray(value, dtype=np.float64).tobytes())
    return digest.hexdigest()
