"""JSON lines that every reader accepts: no NaN, no bare surrogate, one object per line."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from agentrl.core.disk import write_problem
from agentrl.core.errors import StorageError

PROMISED = (
    *("step", "time_s", "reward/mean", "score/mean", "staleness/mean", "staleness/max", "mismatch/max"),
    *("tokens_per_s", "idle/generator", "idle/learner"),
    *("ledger/submitted", "ledger/trained", "ledger/filtered", "ledger/dropped", "ledger/in_flight"),
)
"""Keys that every line of ``metrics.jsonl`` has; ``null`` where a step had nothing to measure, as ``mismatch/max`` has
in an asynchronous step without a token of the current weights."""


def encode(value: Any) -> str:
    """Return one line of ASCII JSON without its newline; a non-finite number becomes ``null``, what JSON does not know its text."""
    return json.dumps(_clean(value), ensure_ascii=True, allow_nan=False, separators=(", ", ": "))


def encode_indented(value: Any) -> str:
    """Return lines of JSON for a person with their newline; values become what `encode` makes of them."""
    return json.dumps(_clean(value), indent=2, allow_nan=False) + "\n"


def _clean(value: Any) -> Any:
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_clean(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy arrays and scalars
        return _clean(value.tolist())
    return str(value)


class JsonLines:
    """A file that grows by whole lines, each on disk before the next call; its directory is made if missing."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("a", encoding="ascii")

    def write(self, line: str) -> None:
        """Append one line that `encode` made, and flush.

        Raises:
            StorageError: If it cannot be written whole.
        """
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise StorageError(f"{self._file.name} cannot be written: {write_problem(error, Path(self._file.name))}") from error

    def close(self) -> None:
        """Close the file; safe to call twice."""
        with contextlib.suppress(OSError):  # what `write` could not write, and has said so
            self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file written by `JsonLines`; a last line cut off by a crash is left out.

    Raises:
        json.JSONDecodeError: If another line than the last is malformed.
    """
    *whole, tail = path.read_text(encoding="utf-8").split("\n")
    objects = [json.loads(line) for line in whole if line]
    try:
        return [*objects, json.loads(tail)] if tail else objects
    except json.JSONDecodeError:
        return objects
