"""One run opened for reading: its files as they grow, in the form that the terminal and the viewer show."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from agentrl.config.mapping import flattened
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import settings_of
from agentrl.core.errors import ConfigError
from agentrl.core.redaction import redacted_values
from agentrl.core.settings import flag
from agentrl.inspect.directory import METRICS, TRAJECTORIES, RunDirectory
from agentrl.inspect.pieces import TokenTexts
from agentrl.inspect.series import MetricTable

LAUNCHES, EVALUATIONS, EVAL = "launches.jsonl", "evaluations.jsonl", "eval.json"
FOLLOW_S = 0.5
"""Seconds between two looks at the files of a run that is shown."""
POLITE_S = 0.01
"""Seconds between two parts of the files while questions are answered."""
IDLE_S = 120.0
"""Seconds without a question after which a run is no longer followed."""
RECENT_S = 300.0
"""Seconds within which a run of an older version, which does not name its process, must have written to count as running."""


class RunReader:
    """A run's directory and what is known of it; several threads may use it.

    Args:
        path: The directory.

    Raises:
        ConfigError: If `path` holds no run.
    """

    def __init__(self, path: str | Path) -> None:
        self.directory = RunDirectory(path)
        self.path, self.settings, self.store = self.directory.path, self.directory.settings, self.directory.store
        self.metrics = MetricTable(self.path)
        self._asked_s = 0.0
        self._follower: threading.Thread | None = None
        self._lock = threading.Lock()

    def open(self, seconds: float = 0.2) -> RunReader:
        """Read what the index and the smaller files say, and of the rest as much as `seconds` allow."""
        self.metrics.advance()
        self.store.advance(seconds)
        return self

    def follow(self) -> None:
        """Read what is left and what comes in a thread of its own, until nobody has asked for a while."""
        self._asked_s = time.monotonic()
        with self._lock:
            if self._follower is None or not self._follower.is_alive():
                self._follower = threading.Thread(target=self._keep_reading, name=f"read {self.path.name}", daemon=True)
                self._follower.start()

    def _keep_reading(self) -> None:
        while time.monotonic() - self._asked_s < IDLE_S:
            self.metrics.advance()
            if self.store.advance():
                time.sleep(FOLLOW_S)
            else:  # a question that waits for the tables goes first
                time.sleep(POLITE_S if time.monotonic() - self._asked_s < FOLLOW_S else 0.001)

    @cached_property
    def config(self) -> TrainConfig | None:
        """The settings; `None` if they cannot be used."""
        try:
            return self.directory.config()
        except ConfigError:
            return None

    @cached_property
    def texts(self) -> TokenTexts:
        """The texts of single tokens."""
        return TokenTexts(self.directory, self.config.model.model if self.config else None)

    @property
    def launches(self) -> list[dict[str, Any]]:
        """The starts and continuations of the run, without credentials, each with ``alive``: if its process is there still."""
        return [{**redacted_values(row), "alive": _lives(row)} for row in self.directory.rows_of(LAUNCHES)]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluations of the run, in order."""
        return self.directory.rows_of(EVALUATIONS)

    @property
    def measured(self) -> dict[str, Any]:
        """Figures of `agentrl eval` in this directory, as ``eval.json`` has them; empty if it is none of an evaluation."""
        return self.directory.json(EVAL) or {}

    def setting(self, name: str) -> Any:
        """Return a setting of the run, in whatever section its version has it; `None` if it has none."""
        return flattened(self.settings).get(name)

    @property
    def tuned_by(self) -> str:
        """The command for given data that made the run, such as ``sft``; empty for a run of ``agentrl train``."""
        return self.directory.tuned_by

    def changed(self, config: type[Any] = TrainConfig) -> list[str]:
        """Names of the settings, with their sections, that differ from the defaults of a command's settings."""
        table = settings_of(config)
        return [
            f"{table[name].section}.{name}"
            for name, value in flattened(self.settings).items()
            if name in table and not table[name].is_default(value)
        ]

    def status(self, launches: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Return ``running``, ``finished``, ``interrupted``, ``failed``, ``killed`` or ``unknown``."""
        launches = self.launches if launches is None else launches
        alive = any(launch["alive"] for launch in launches)
        summary = self.directory.summary()
        if not launches and (measured := self.measured):  # written at the end of an evaluation
            return "interrupted" if measured.get("partial") else "finished"
        if not launches and not self.settings and not (self.path / METRICS).exists():  # a file of another system
            return "unknown"
        started = max((float(launch.get("started_s", 0.0)) for launch in launches), default=0.0)
        # While a process lives, a summary from before its start is of an earlier part of the run.
        if summary.get("status") and not (alive and started > self._written("summary.json")):
            return str(summary["status"])
        if launches:
            return "running" if alive else "unknown" if launches[-1].get("host") != socket.gethostname() else "killed"
        recent = time.time() - max(self._written(METRICS), self._written(TRAJECTORIES)) < RECENT_S
        return "running" if recent else "unknown"

    def _written(self, name: str) -> float:
        try:
            return (self.path / name).stat().st_mtime
        except OSError:
            return 0.0


def _lives(launch: Mapping[str, Any]) -> bool:
    """Return True if the process of a launch is still there; of another machine nobody knows, so False."""
    if launch.get("host") != socket.gethostname():
        return False
    try:
        process = psutil.Process(int(launch["pid"]))
        # The system uses ids of processes again, so the time of the start must fit as well.
        return abs(process.create_time() - float(launch["process_s"])) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False


def flags(config: type[Any] = TrainConfig) -> dict[str, str]:
    """Return the flag of each setting of a command by ``section.name``."""
    return {f"{setting.section}.{name}": flag(name) for name, setting in settings_of(config).items()}


def settings_differ(readers: Sequence[RunReader]) -> list[dict[str, Any]]:
    """Return the settings in which runs differ, with the value of each run; `None` where a run does not know the setting."""
    names = dict.fromkeys(
        f"{section}.{name}"
        for reader in readers
        for section, values in reader.settings.items()
        if isinstance(values, Mapping)
        for name in values
    )
    known, rows = flags(), []
    for full in names:
        section, _, name = full.partition(".")
        values = [(reader.settings.get(section) or {}).get(name) for reader in readers]
        if any(value != values[0] for value in values):
            rows.append({"name": full, "flag": known.get(full), "values": values, "differs": True})
    return rows
