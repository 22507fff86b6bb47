"""A file system of fsspec that fails as it is told to, and holds its files in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class FlakyFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """``flaky://``: every write, read and listing asks `fault` first, which may raise, wait or note."""

    protocol = ("flaky",)
    store: dict[str, Any] = {}  # noqa: RUF012  # as in the class it is made from
    pseudo_dirs = [""]  # noqa: RUF012
    calls: list[tuple[str, str]] = []  # noqa: RUF012
    fault: Callable[[str, str], None] = staticmethod(lambda kind, path: None)
    cut: set[str] = set()  # noqa: RUF012  # names of files of which the last byte does not arrive
    released = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        text: str = MemoryFileSystem._strip_protocol(str(path).replace("flaky://", "memory://", 1))
        return text

    def _called(self, kind: str, path: str) -> None:
        type(self).calls.append((kind, path))
        type(self).fault(kind, path)

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        self._called("put", rpath)
        super().put_file(lpath, rpath, **options)
        if rpath.rpartition("/")[2] in self.cut:
            self.pipe_file(rpath, self.cat_file(rpath)[:-1])

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self._called("pipe", path)
        super().pipe_file(path, value, **options)

    def get_file(self, rpath: str, lpath: str, **options: Any) -> None:
        self._called("get", rpath)
        super().get_file(rpath, lpath, **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._called("ls", path)
        return super().ls(path, detail=detail, **options)


def fresh_flaky() -> type[FlakyFileSystem]:
    """Register ``flaky://``, empty and without faults."""
    fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
    FlakyFileSystem.clear_instance_cache()
    FlakyFileSystem.store, FlakyFileSystem.pseudo_dirs, FlakyFileSystem.calls, FlakyFileSystem.cut = {}, [""], [], set()
    FlakyFileSystem.fault = staticmethod(lambda kind, path: None)
    return FlakyFileSystem
