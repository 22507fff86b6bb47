"""Reader of a run's directory; also reads a run that was killed in the middle of a line."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from agentrl.assets import tiny_model_path
from agentrl.config.evaluate import EvaluateConfig, SampleConfig
from agentrl.config.mapping import from_mapping
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.inspect.tail import read_line
from agentrl.track.index import Row, parsed, read_index, row_of
from agentrl.track.sinks import EVAL_TRAJECTORIES
from agentrl.track.summary import SummaryBuilder

Record: TypeAlias = Mapping[str, Any]

CONFIG, METRICS, SUMMARY, TRAJECTORIES = "config.json", "metrics.jsonl", "summary.json", "trajectories.jsonl"
REQUESTS = "requests.jsonl"
_OF_EVALUATION = re.compile(r"eval-\d+-")
"""Begins the names of episodes of a training run's evaluations."""


class Place(NamedTuple):
    """Place of a line in its file, in bytes."""

    start: int
    size: int


class RunDirectory:
    """A run's directory.

    Args:
        path: Path as the user gave it.

    Attributes:
        unreadable: Lines that are not JSON objects, as "name, line number"; filled in while files are read. A last line
            that was cut off is not reported.

    Raises:
        ConfigError: If `path` is no directory, or holds no run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.unreadable: list[str] = []
        if not self.path.is_dir():
            problem = "is a file" if self.path.exists() else "there is no such directory"
            raise ConfigError("RUN", str(path), problem, "Name a run's directory, as printed at its end.")
        if not any((self.path / name).exists() for name in (CONFIG, METRICS, TRAJECTORIES)):
            problem = f"holds no run: neither {CONFIG} nor {METRICS} nor {TRAJECTORIES} is there"
            raise ConfigError("RUN", str(path), problem, "Name a run's directory, as printed at its end.")

    def config(self) -> TrainConfig:
        """Return the run's configuration; a `ConfigError` if ``config.json`` is missing or cannot be used."""
        data = self._json(CONFIG)
        if data is None:
            raise ConfigError("RUN", str(self.path), f"has no readable {CONFIG}", "Copy it from the run, it says what was run.")
        return from_mapping(TrainConfig, data, source=str(self.path / CONFIG), ignored=(EvaluateConfig, SampleConfig))

    def summary(self) -> Record:
        """Return the contents of ``summary.json``; empty if the run has not written it."""
        return self._json(SUMMARY) or {}

    def summed_up(self) -> Record:
        """The summary, with what it lacks filled in from the metrics; empty before the first step."""
        written, metrics = self.summary(), self.steps()
        if not written and not metrics:
            return {}
        builder = SummaryBuilder()
        for row in metrics:
            builder.add(row)
        wall_s = float(metrics[-1].get("time_s", math.nan)) if metrics else math.nan
        return {**builder.build(run_dir=self.path, wall_s=wall_s, status="unfinished"), **written}

    def model(self) -> Path | None:
        """The best model if one was kept, else the last; `None` if there is none."""
        return next((path for path in (self.path / "best", self.path / "model") if (path / CONFIG).is_file()), None)

    def tokenizer_path(self, config: TrainConfig) -> str:
        """Return the directory or hub name of the run's tokenizer: its initial model, else its saved model."""
        path, saved = config.model.model or str(tiny_model_path()), self.path / "model"
        local = path.startswith(("/", "./", "../", "~")) or path.count("/") > 1
        return str(saved) if local and not Path(path).expanduser().is_dir() and saved.is_dir() else path

    def metrics(self) -> list[Record]:
        """Return one row per step; empty without ``metrics.jsonl``."""
        return list(self._lines(METRICS)) if (self.path / METRICS).is_file() else []

    def steps(self) -> list[Record]:
        """Return the metrics of each step that has a reward, without values that are not known."""
        metrics = [{name: value for name, value in row.items() if value is not None} for row in self.metrics()]
        return [row for row in metrics if "reward/mean" in row]

    def records(self, containing: bytes = b"", *, start: int = 0, number: int = 0) -> Iterator[Record]:
        """Yield the recorded trajectories in the order of writing, one line in memory at a time.

        Args:
            containing: Only lines with this text; others are not parsed.
            start: Byte to begin at.
            number: Lines before it.

        Raises:
            ConfigError: If the run recorded no trajectories.
        """
        if not (self.path / TRAJECTORIES).is_file():
            remedy = "Train with --record all to record every episode, or --record sample for one of each group."
            raise ConfigError("RUN", str(self.path), f"has no {TRAJECTORIES}", remedy)
        return self._lines(TRAJECTORIES, containing, start, number)

    def episodes(self, episode: str = "") -> Iterator[list[Record]]:
        """Yield the records of each episode, one per agent; of one episode by its name, of a group by its number, or of all."""
        records = self.records() if not episode else self._records_of(episode)
        for _, found in itertools.groupby(records, lambda record: record.get("episode_id")):
            yield list(found)

    def rows(self, group: str = "") -> Iterator[Row]:
        """Yield what a list shows of each recorded trajectory, or of those of a group, from the index as far as it goes.

        Raises:
            ConfigError: If the run recorded no trajectories.
        """
        found = (row for row, _ in self._indexed())
        return (row for row in found if str(row.group) == group) if group else found

    def _records_of(self, episode: str) -> Iterator[Record]:
        """The records of an episode or of a group, of which only those are read."""
        group, path = episode.isdecimal(), self.path / TRAJECTORIES
        if _OF_EVALUATION.match(episode) and (self.path / EVAL_TRAJECTORIES).is_file():
            path = self.path / EVAL_TRAJECTORIES
        key = f'"group_id": {episode},' if group else f'"episode_id": "{episode}"'
        for row, record in self._indexed(key.encode(), path):
            if (str(row.group) if group else row.episode) == episode:
                found = record if not isinstance(record, Place) else parsed(read_line(path, *record))
                if found is not None:
                    yield found

    def _indexed(self, containing: bytes = b"", path: Path | None = None) -> Iterator[tuple[Row, Record | Place]]:
        """Rows with the places of their records, as far as the index goes, and with the records themselves behind that."""
        path = path or self.path / TRAJECTORIES
        start = number = 0
        if path.is_file():
            for values in read_index(path):
                place = Place(int(values[0]), int(values[1]))
                start, number = place.start + place.size + 1, number + 1
                yield Row(*values[2:]), place
        evaluated = path.name == EVAL_TRAJECTORIES
        records = self._lines(path.name, containing, start, number) if evaluated else self.records(containing, start=start, number=number)
        for record in records:
            yield row_of(record), record

    def request_logs(self) -> Callable[[str], Record | None]:
        """Return the finder of an episode's log of requests by its name; the file is read once for the places of its lines."""
        path, places = self.path / REQUESTS, dict[str, int]()
        if path.is_file():
            with path.open("rb") as file:
                start = 0
                for line in file:
                    name = line[: line.find(b",")].rpartition(b": ")[2]  # a log begins with the episode's name
                    places[name.strip(b'"').decode("ascii", "replace")] = start
                    start += len(line)

        def find(episode: str) -> Record | None:
            if episode not in places:
                return None
            with path.open("rb") as file:
                file.seek(places[episode])
                line = file.readline()
            try:
                log = json.loads(line)
            except (ValueError, RecursionError):
                if line.endswith(b"\n"):
                    self.unreadable.append(f"{REQUESTS}, episode {episode}")
                return None
            return log if isinstance(log, dict) else None

        return find

    def _json(self, name: str) -> Record | None:
        try:
            data = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return data if isinstance(data, dict) else None

    def _lines(self, name: str, containing: bytes = b"", start: int = 0, before: int = 0) -> Iterator[Record]:
        with (self.path / name).open("rb") as file:
            file.seek(start)
            for number, line in enumerate(file, start=before + 1):
                if containing not in line or not line.strip():
                    continue
                row = parsed(line)
                if row is not None:
                    yield row
                elif line.endswith(b"\n"):
                    self.unreadable.append(f"{name}, line {number}")
