"""Files of JSON lines that grow while they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

Line: TypeAlias = tuple[int, bytes]
"""Offset of a line in its file, and the line without its newline."""

CHUNK_BYTES = 2**20


class Tail:
    """Follows a file: hands over whole lines as they come, each once, and begins again if the file was replaced or cut.

    Args:
        path: The file, which need not exist yet.
        take: Called with the lines of a chunk, in order.
        forget: Called when the file is another one, before its lines are handed over from the beginning.
        start: Offset to begin at, the beginning of a line.
    """

    def __init__(self, path: Path, take: Callable[[Iterable[Line]], None], forget: Callable[[], None], start: int = 0) -> None:
        self.path, self._take, self._forget = path, take, forget
        self.read, self.size = start, start  # bytes handed over, and bytes that there were at the last look
        self._file_id: int | None = None
        self._unfinished = 0  # bytes of a last line without its newline

    @property
    def done(self) -> bool:
        """True if everything was handed over that was there at the last look, but for a last line without its newline."""
        return self._unfinished == self.size - self.read

    def look(self) -> None:
        """See how large the file is, and if it is still the same."""
        try:
            status = self.path.stat()
        except OSError:
            file_id, size = None, 0
        else:
            file_id, size = status.st_ino, status.st_size
        replaced = self._file_id is not None and file_id != self._file_id
        if replaced or size < self.read:
            self._forget()
            self.read = 0
        if replaced or size != self.size:
            self._unfinished = 0
        self._file_id, self.size = file_id, size

    def advance(self, most: int = CHUNK_BYTES) -> bool:
        """Hand over about `most` bytes of what is new, at least a line if there is one; returns True if nothing is left."""
        self.look()
        if self.done:
            return True
        try:
            data = self._chunk(most)
        except OSError:
            return True
        if not data:
            self._unfinished = self.size - self.read
            return True
        start, self.read = self.read, self.read + len(data)
        self._take(_lines(data, start))
        return self.done

    def _chunk(self, most: int) -> bytes:
        """Whole lines from where reading stands; empty if there is none."""
        with self.path.open("rb") as file:
            file.seek(self.read)
            data = file.read(min(most, self.size - self.read))
            while b"\n" not in data:
                more = file.read(min(most, self.size - self.read - len(data)))
                if not more:
                    return b""
                data += more
        return data[: data.rindex(b"\n") + 1]


def _lines(data: bytes, start: int) -> Iterable[Line]:
    for line in data.split(b"\n")[:-1]:
        if line.strip():
            yield start, line
        start += len(line) + 1


def read_line(path: Path, start: int, size: int) -> bytes:
    """Return a line by its place; empty if the file is gone."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(size)
    except OSError:
        return b""
