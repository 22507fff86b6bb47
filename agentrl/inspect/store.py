"""Tables in memory of where everything stands in the files of a run: recorded episodes, groups, steps and annotations.

The tables hold a row for each line, never its tokens. They are filled from the index beside ``trajectories.jsonl`` where there is one, and
otherwise from the files themselves, a part at a time, so that the first rows can be shown while the rest is read.
"""

from __future__ import annotations

import json
import re
import sqlite3
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.core.annotations import FILE as ANNOTATIONS
from agentrl.inspect.tail import Line, Tail, read_line
from agentrl.track.index import COLUMNS, index_values, parsed, read_index
from agentrl.track.sinks import EVAL_TRAJECTORIES

GROUPS, STEPS = "groups.jsonl", "steps.jsonl"
PART = 2**48
"""Added to the places of the episodes of evaluations, which are in a file of their own, so that one number says file and byte."""

_NUMBERS = ("start", "bytes", "group", "attempt", "step", "turns", "tokens", "reward", "score", "ended_s", "seconds")
_EPISODES = ", ".join(f'"{name}"' + ("" if name in _NUMBERS else " TEXT") for name in COLUMNS)
SCHEMA = f"""
CREATE TABLE episodes (id INTEGER PRIMARY KEY, {_EPISODES});
CREATE INDEX episodes_episode ON episodes (episode);
CREATE INDEX episodes_group ON episodes ("group");
CREATE TABLE groups (id INTEGER PRIMARY KEY, start, bytes, "group", attempt, task TEXT, verdict TEXT, reason TEXT, version,
  low, ended_s, seconds, members, failures, mean, spread, passed, counted);
CREATE INDEX groups_group ON groups ("group");
CREATE INDEX groups_ended ON groups (ended_s);
CREATE INDEX groups_task ON groups (task);
CREATE TABLE steps (step PRIMARY KEY, start, bytes, begin_s, live_s);
CREATE TABLE members (step, "group", spare);
CREATE INDEX members_step ON members (step);
CREATE INDEX members_group ON members ("group");
CREATE TABLE annotations (start, bytes, trajectory TEXT, step);
CREATE INDEX annotations_trajectory ON annotations (trajectory);
CREATE INDEX annotations_step ON annotations (step);
"""
_ANNOTATION = re.compile(rb'\{"trajectory_id": "((?:[^"\\]|\\.)*)", "step": (\d+)')
"""The beginning of a line of annotations, which spares the reader the rest."""


class Store:
    """The tables of one run; several threads may use them.

    Args:
        folder: Directory of the run.
        records: The file of recorded trajectories.
        pass_score: Score from which a member counts as passed.
    """

    def __init__(self, folder: Path, records: Path, *, pass_score: float = 1.0) -> None:
        self.folder, self.records, self._pass_score = folder, records, pass_score
        self._files = (records, folder / EVAL_TRAJECTORIES)
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        self._db.executescript(SCHEMA)
        self.lock = threading.RLock()
        self.unreadable: list[str] = []
        self._tails = {
            "episodes": self._tail(records, "episodes", partial(self._take_records, 0), condition=f"start < {PART}"),
            "evaluated": self._tail(self._files[1], "episodes", partial(self._take_records, 1), condition=f"start >= {PART}"),
            "groups": self._tail(folder / GROUPS, "groups", self._take_groups),
            "steps": self._tail(folder / STEPS, "steps", self._take_steps, "members"),
            "annotations": self._tail(folder / ANNOTATIONS, "annotations", self._take_annotations),
        }

    def _tail(self, path: Path, table: str, take: Callable[[Iterable[Line]], None], *more: str, condition: str = "1") -> Tail:
        def forget() -> None:
            for name in (table, *more):
                self._db.execute(f"DELETE FROM {name} WHERE {condition}")

        return Tail(path, take, forget)

    def open(self, seconds: float = 0.2) -> None:
        """Fill the tables from the index, and for at most `seconds` from the files."""
        for number, name in enumerate(("episodes", "evaluated")):
            with self.lock:
                end = 0
                values: Iterator[list[Any]] = read_index(self._files[number])
                while batch := [row for _, row in zip(range(5000), values, strict=False)]:
                    end = int(batch[-1][0]) + int(batch[-1][1]) + 1
                    self._add_episodes([(row[0] + number * PART, *row[1:]) for row in batch])
                tail = self._tails[name]
                tail.read = tail.size = end
        self.advance(seconds)

    def advance(self, seconds: float = 0.2) -> bool:
        """Read on for at most `seconds`; returns True if everything is read."""
        until = time.monotonic() + seconds
        waiting = [self._tails[name] for name in ("steps", "groups", "annotations", "evaluated", "episodes")]
        while waiting:
            with self.lock:
                tail = waiting.pop(0)
                if not tail.advance():
                    waiting.append(tail)
            if time.monotonic() > until:
                break
        return not waiting

    @property
    def progress(self) -> dict[str, Any]:
        """Bytes of the file of trajectories that are read, and bytes there are."""
        tail = self._tails["episodes"]
        return {"done": tail.done, "bytes": tail.read, "of": tail.size}

    def query(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows that an SQL query finds."""
        with self.lock:
            return self._db.execute(sql, values).fetchall()

    def one(self, sql: str, values: Sequence[Any] = ()) -> Any:
        """Return the first value of the first row, `None` if there is none."""
        found = self.query(sql, values)
        return found[0][0] if found else None

    def lines(self, name: str, places: Iterable[tuple[int, int]]) -> list[dict[str, Any]]:
        """Return the JSON objects that stand at places of a file; what cannot be read is left out."""
        path = None if name == "episodes" else self._tails[name].path
        read = (self.episode_line(*place) if path is None else read_line(path, *place) for place in places)
        found = (parsed(line) for line in read)
        return [row for row in found if row is not None]

    def episode_line(self, start: int, size: int) -> bytes:
        """Return the line of a recorded trajectory by its place in the table."""
        number, offset = divmod(start, PART)
        return read_line(self._files[number], offset, size)

    def _take_records(self, number: int, lines: Iterable[Line]) -> None:
        rows = []
        for start, line in lines:
            record = parsed(line)
            if record is None:
                self.unreadable.append(f"{self._files[number].name}, byte {start}")
            else:
                rows.append(index_values(record, start + number * PART, len(line)))
        self._add_episodes(rows)

    def _add_episodes(self, rows: Iterable[Sequence[Any]]) -> None:
        columns = ", ".join(f'"{name}"' for name in COLUMNS)
        marks = ", ".join("?" * len(COLUMNS))
        self._db.executemany(f"INSERT INTO episodes ({columns}) VALUES ({marks})", rows)

    def _take_groups(self, lines: Iterable[Line]) -> None:
        rows = [self._group(start, line, row) for start, line in lines if (row := parsed(line)) is not None]
        self._db.executemany(f"INSERT INTO groups VALUES (NULL, {', '.join('?' * 17)})", rows)

    def _group(self, start: int, line: bytes, row: Mapping[str, Any]) -> tuple[Any, ...]:
        rewards = [value for value in row.get("rewards", ()) if value is not None]
        scores = [value for value in row.get("scores", ()) if value is not None]
        versions = row.get("versions") or (None, None)
        return (
            *(start, len(line), row.get("group_id"), row.get("attempt", 0), row.get("task_id")),
            *(row.get("verdict"), row.get("reason"), row.get("version"), versions[0], row.get("ended_s"), row.get("group_s")),
            *(len(row.get("rewards", ())), len(row.get("rewards", ())) - len(rewards)),
            *(statistics.fmean(rewards) if rewards else None, statistics.pstdev(rewards) if rewards else None),
            *(statistics.fmean(score >= self._pass_score - 1e-9 for score in scores) if scores else None, len(rewards)),
        )

    def _take_steps(self, lines: Iterable[Line]) -> None:
        for start, line in lines:
            if (row := parsed(line)) is None or "step" not in row:
                continue
            self._db.execute("DELETE FROM members WHERE step = ?", (row["step"],))
            values = (row["step"], start, len(line), row.get("begin_s"), row.get("live_s"))
            self._db.execute("INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?)", values)
            pairs = [(row["step"], group, spare) for name, spare in (("groups", 0), ("spare", 1)) for group in row.get(name, ())]
            self._db.executemany("INSERT INTO members VALUES (?, ?, ?)", pairs)

    def _take_annotations(self, lines: Iterable[Line]) -> None:
        rows = []
        for start, line in lines:
            if (found := _ANNOTATION.match(line)) is not None:
                rows.append((start, len(line), json.loads(b'"' + found[1] + b'"'), int(found[2])))
        self._db.executemany("INSERT INTO annotations VALUES (?, ?, ?, ?)", rows)

    def close(self) -> None:
        """Release the tables."""
        with self.lock:
            self._db.close()
