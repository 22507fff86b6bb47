"""Files of JSON lines that grow while they are read."""

from __future__ import annotations

import os
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

    Attributes:
        read: Bytes handed over, or to be left out.
        size: Bytes that there were at the last look.
        done: True if everything was handed over that was there then, but for a last line without its newline.
    """

    def __init__(self, path: Path, take: Callable[[Iterable[Line]], None], forget: Callable[[], None]) -> None:
        self.path, self._take, self._forget = path, take, forget
        self.read, self.size, self.done = 0, 0, False
        self._inode: int | None = None

    def advance(self, most: int = CHUNK_BYTES) -> bool:
        """Hand over about `most` bytes of what is new, at least a line if there is one; returns True if nothing is left."""
        data = self._chunk(most)
        start, self.read = self.read, self.read + len(data)
        self._take(_lines(data, start))
        self.done = not data or self.read == self.size
        return self.done

    def _chunk(self, most: int) -> bytes:
        """Whole lines from where reading stands; empty if there is none."""
        try:
            with self.path.open("rb") as file:
                # The open file is asked, because the path may name another file by now.
                status = os.fstat(file.fileno())
                self._look(status.st_ino, status.st_size)
                file.seek(self.read)
                data = file.read(most)
                # A line may be longer than a part, and is handed over whole.
                while b"\n" not in data and (more := file.read(most)):
                    data += more
        except OSError:
            self._look(None, 0)
            return b""
        return data[: data.rfind(b"\n") + 1]

    def _look(self, inode: int | None, size: int) -> None:
        if size < self.read or self._inode not in (None, inode):
            self._forget()
            self.read = 0
        self._inode, self.size = inode, size


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
