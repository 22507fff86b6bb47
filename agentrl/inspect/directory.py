"""Reader of a run's directory; also reads a run that was killed in the middle of a line."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from agentrl.assets import model_path, tiny_model_path
from agentrl.config.mapping import COMMAND, read_saved
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.core.redaction import redacted_values
from agentrl.inspect.store import LOGS, RECORDS, Store, conditions, named
from agentrl.inspect.store import REQUESTS as REQUESTS
from agentrl.inspect.store import TRAJECTORIES as TRAJECTORIES
from agentrl.inspect.tail import read_line
from agentrl.track.index import parsed
from agentrl.track.jsonl import read_lines
from agentrl.track.summary import SummaryBuilder

Record: TypeAlias = Mapping[str, Any]

CONFIG, METRICS, SUMMARY = "config.json", "metrics.jsonl", "summary.json"
LINE_END = b"\n"


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

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Contents of ``config.json``, to be shown, without credentials that an earlier version wrote; empty if it cannot be read."""
        return dict(redacted_values(self.json(CONFIG) or {}))

    @property
    def tuned_by(self) -> str:
        """The command for given data that made the run, such as ``sft``; empty for a run of ``agentrl train``."""
        command = self.settings.get(COMMAND)
        return command if isinstance(command, str) else ""

    def played(self) -> RunDirectory:
        """Return the directory itself.

        Raises:
            ConfigError: If it is of a run on given data, which plays no episodes.
        """
        if self.tuned_by:
            remedy = f"`agentrl view {self.path}` shows its losses, and the tokens of some of its rows."
            raise ConfigError("RUN", str(self.path), f"is a run of `agentrl {self.tuned_by}`, which plays no episodes", remedy)
        return self

    @cached_property
    def store(self) -> Store:
        """The tables of the run, of which nothing is read yet."""
        pass_score = (self.settings.get("eval") or {}).get("eval_pass_score")
        return Store(self.path, pass_score=1.0 if pass_score is None else float(pass_score))

    def config(self) -> TrainConfig:
        """Return the run's configuration; a `ConfigError` if ``config.json`` is missing or cannot be used."""
        data = self.json(CONFIG)
        if data is None:
            raise ConfigError("RUN", str(self.path), f"has no readable {CONFIG}", "Copy it from the run, it says what was run.")
        return read_saved(data, str(self.path / CONFIG))

    def summary(self) -> Record:
        """Return the contents of ``summary.json``; empty if the run has not written it."""
        return self.json(SUMMARY) or {}

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

    def tokenizer_path(self, model: str) -> str:
        """Return the directory or hub name of the run's tokenizer: that of its initial `model`, else of its saved model."""
        path, saved = model_path(model), self.path / "model"
        # A name on the hub has one slash at most; more of them are a path.
        local = path.startswith(("/", "./", "../", "~")) or path.count("/") > 1
        return str(saved) if local and not Path(path).expanduser().is_dir() and saved.is_dir() else path

    def named_model(self) -> str:
        """Return the model that the settings name, those of another command than ``agentrl train`` too; empty without settings."""
        model = self.settings.get("model")
        return str(model.get("model") or tiny_model_path()) if isinstance(model, Mapping) else ""

    def metrics(self) -> list[Record]:
        """Return one row per step; empty without ``metrics.jsonl``."""
        return list(self._lines(METRICS)) if (self.path / METRICS).is_file() else []

    def steps(self) -> list[Record]:
        """Return the metrics of each step that has a reward, without values that are not known."""
        metrics = [{name: value for name, value in row.items() if value is not None} for row in self.metrics()]
        return [row for row in metrics if "reward/mean" in row]

    def records(self) -> Iterator[Record]:
        """Yield the recorded trajectories in the order of writing, one line in memory at a time.

        Raises:
            ConfigError: If the run recorded no trajectories.
        """
        self._check_recorded()
        return self._lines(TRAJECTORIES)

    def episodes(self, episode: str = "") -> Iterator[list[Record]]:
        """Yield the records of each episode, one per agent; of one episode by its name, of a group by its number, or of all."""
        records = self.chosen(named(episode)) if episode else self.records()
        for _, members in itertools.groupby(records, lambda record: record.get("episode_id")):
            yield list(members)

    def chosen(self, chosen: Mapping[str, Any]) -> Iterator[Record]:
        """Yield the records that meet `agentrl.inspect.store.conditions`; only these are read."""
        where, values = conditions(chosen)
        for place in self.recorded().query(f"SELECT start, bytes FROM episodes WHERE {where} ORDER BY id", values):
            yield from self.store.lines("episodes", [place])

    def recorded(self) -> Store:
        """Return the tables with all recorded trajectories, also of evaluations.

        Raises:
            ConfigError: If the run recorded no trajectories.
        """
        self._check_recorded()
        return self.store.complete(RECORDS)

    def _check_recorded(self) -> None:
        if not (self.path / TRAJECTORIES).is_file():
            remedy = "Train without --record none; --record all records every episode, --record sample one of each group."
            raise ConfigError("RUN", str(self.path), f"has no {TRAJECTORIES}", remedy)

    def unreadable_records(self) -> list[str]:
        """Return the lines that the tables could not read, named as in `unreadable`."""
        places = ((name, read_line(self.path / name, 0, start)) for name, start in self.store.unreadable)
        return [f"{name}, line {before.count(LINE_END) + 1}" for name, before in places]

    def request_logs(self) -> Callable[[str], Record | None]:
        """Return the finder of an episode's log of requests by its name; the file is read once for the places of its lines."""
        store = self.store.complete((LOGS,))

        def find(episode: str) -> Record | None:
            places = store.query("SELECT start, bytes FROM requests WHERE episode = ? ORDER BY id DESC LIMIT 1", (episode,))
            logs = store.lines(LOGS, places)
            if places and not logs:
                self.unreadable.append(f"{REQUESTS}, episode {episode}")
            return logs[0] if logs else None

        return find

    def json(self, name: str) -> dict[str, Any] | None:
        """Return the object in a file; `None` if there is none."""
        try:
            data = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return data if isinstance(data, dict) else None

    def rows_of(self, name: str) -> list[dict[str, Any]]:
        """Return the objects of a small file of lines; none if it cannot be read."""
        try:
            return read_lines(self.path / name)
        except (OSError, ValueError):
            return []

    def _lines(self, name: str) -> Iterator[Record]:
        with (self.path / name).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                if (row := parsed(line)) is not None:
                    yield row
                elif line.endswith(b"\n"):
                    self.unreadable.append(f"{name}, line {number}")
