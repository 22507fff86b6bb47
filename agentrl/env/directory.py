"""The current directory of a process in which episodes are played: it is the run's, whatever an environment does."""

from __future__ import annotations

import logging
import os

_log = logging.getLogger(__name__)


class CurrentDirectory:
    """Remembers the present directory, and goes back to it."""

    def __init__(self) -> None:
        self._path = os.getcwd()
        self._is_told = False

    def restore(self, where: str) -> None:
        """Go back after a call of user code, the method `where`; warn the first time."""
        try:
            found = os.getcwd()
        except OSError:  # it has been removed
            found = "a folder that is gone"
        if found == self._path:
            return
        os.chdir(self._path)
        if not self._is_told:
            self._is_told = True
            remedy = f"it is {self._path!r} again. Use absolute paths, and cwd= for programs, in place of os.chdir"
            _log.warning("%s changed the current directory of the whole process to %r; %s", where, found, remedy)
