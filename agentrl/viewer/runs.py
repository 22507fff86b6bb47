"""The runs that a viewer shows: those of a folder, or one; a file of another system becomes a run in a temporary folder."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.core.errors import AgentRLError, ConfigError
from agentrl.inspect.listing import find_runs, in_order, run_card, unreadable_card
from agentrl.inspect.reader import RunReader

LOOK_S = 2.0
"""Seconds between two looks for new runs in a folder."""
MAX_OPEN = 4
"""Runs whose tables are held at once; the one that was looked at longest ago is closed for another."""
OPEN_S = 0.1
"""Seconds for which the first question about a run waits beyond what the index takes; the rest is read in the background."""
SEPARATOR = "~"


class NoSuchRunError(ConfigError):
    """The viewer does not show a run of that name."""


class RunCollection:
    """The runs below a folder by their ids, which are the only way to name one, so that no request reaches another file.

    Args:
        folder: A folder of runs, or a run.

    Raises:
        ConfigError: If it is neither.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            problem = "is a file" if folder.exists() else "there is no such directory"
            raise ConfigError("RUN", str(folder), problem, "Name a run's directory, or a folder with runs in it.")
        self._lock = threading.Lock()
        self._paths: dict[str, Path] = {}
        self._cards: dict[str, RunReader] = {}
        self._open: OrderedDict[str, RunReader] = OrderedDict()
        self._looked_s = -LOOK_S
        self._look()
        if not self._paths:
            remedy = "Name a run's directory, as printed at its end, or the folder that holds it (runs)."
            raise ConfigError("RUN", str(folder), "holds no run", remedy)

    @property
    def single(self) -> bool:
        """True if the folder is a run itself."""
        return list(self._paths.values()) == [self.folder]

    def _look(self) -> None:
        if time.monotonic() - self._looked_s < LOOK_S:
            return
        self._looked_s = time.monotonic()
        paths = {self._name(path): path for path in find_runs(self.folder)}
        for name in self._cards.keys() - paths.keys():
            del self._cards[name]
        self._paths = paths

    def _name(self, path: Path) -> str:
        parts = path.relative_to(self.folder).parts
        return SEPARATOR.join(parts) or path.resolve().name or "run"

    def cards(self) -> list[dict[str, Any]]:
        """Return what the list of runs shows, with the run that was written to last first."""
        with self._lock:
            self._look()
            return in_order([self._card(name, path) for name, path in self._paths.items()])

    def _card(self, name: str, path: Path) -> dict[str, Any]:
        try:
            reader = self._open.get(name) or self._cards.get(name)
            if reader is None:
                reader = self._cards[name] = RunReader(path)
            reader.metrics.advance()
            return run_card(reader, name)
        # A run that is being written, or that another version wrote, must not hide the others.
        except (AgentRLError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            return unreadable_card(path, name, f"{type(error).__name__}: {error}")

    def run(self, name: str) -> RunReader:
        """Return a run, opened and followed.

        Raises:
            NoSuchRunError: If there is none of that id.
        """
        with self._lock:
            if name not in self._paths:
                # The run may have begun since the last look.
                self._look()
            if name not in self._paths:
                raise NoSuchRunError("run", name, "is not among the runs that are shown", f"They are those below {self.folder}.")
            reader = self._open.get(name)
            if reader is None:
                reader = self._open[name] = RunReader(self._paths[name]).open(OPEN_S)
            self._open.move_to_end(name)
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        reader.follow()
        return reader

    def prepare(self) -> None:
        """Open the run that was written to last in a thread of its own, so that it is read when a person gets to it."""
        newest = next(iter(self.cards()), None)
        if newest is not None and not newest["problem"]:
            threading.Thread(target=self.run, args=(newest["id"],), name="prepare", daemon=True).start()

    def changes(self) -> Mapping[str, Any]:
        """Return a version for the list and for each run, which is another if something is new."""
        versions = {card["id"]: f"{card.get('step')}-{card.get('status')}-{card.get('bytes')}" for card in self.cards()}
        return {"version": str(hash(tuple(versions.items()))), "runs": versions}
