"""The current directory of a process in which episodes are played: it is the run's, whatever an environment does."""

from __future__ import annotations

import ctypes
import logging
import os

_log = logging.getLogger(__name__)
_MAX_PATH = 4096

# `os.getcwd` lets another thread go on, an engine's for example, and waits until that has paused: 50 us and more, behind each call of user
# code. The same function of the C library called so keeps Python's lock.
_getcwd = ctypes.PyDLL(None).getcwd
_getcwd.argtypes, _getcwd.restype = (ctypes.c_char_p, ctypes.c_size_t), ctypes.c_char_p


class CurrentDirectory:
    """Remembers the present directory, and goes back to it."""

    def __init__(self) -> None:
        self._path = os.getcwd()
        self._bytes, self._buffer = os.fsencode(self._path), ctypes.create_string_buffer(_MAX_PATH)
        self._is_told = False

    def restore(self, where: str) -> None:
        """Go back after a call of user code, the method `where`; warn the first time."""
        present = _getcwd(self._buffer, _MAX_PATH)
        if present == self._bytes:
            return
        found = "a folder that is gone" if present is None else os.fsdecode(present)
        os.chdir(self._path)
        if not self._is_told:
            self._is_told = True
            remedy = f"it is {self._path!r} again. Use absolute paths, and cwd= for programs, in place of os.chdir"
            _log.warning("%s changed the current directory of the whole process to %r; %s", where, found, remedy)
