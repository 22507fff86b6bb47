"""Tables in memory of where everything stands in the files of a run: recorded episodes, groups, steps and annotations.

The tables hold a row for each line, never its tokens. They are filled from the index beside ``trajectories.jsonl`` as far as it goes, and
otherwise from the files themselves, a part at a time, so that the first rows can be shown while the rest is read.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.core.annotations import FILE as ANNOTATIONS
from agentrl.inspect.tail import Line, Tail, read_line
from agentrl.track.index import COLUMNS, TRAINING, index_values, parsed, read_index
from agentrl.track.sinks import EVAL_TRAJECTORIES, GROUPS

TRAJECTORIES, STEPS = "trajectories.jsonl", "steps.jsonl"
REQUESTS, LOGS = "requests.jsonl", "requests"
RECORDS = ("episodes", "evaluated")
FILES = ("steps", "groups", "annotations", *reversed(RECORDS))
"""Names of the files in the tables, in the order of reading; logs of requests, which are large, are read where they are asked for."""
PART = 2**48
"""Added to the places of the episodes of evaluations, which are in a file of their own, so that one number says file and byte."""

_NUMBERS = ("start", "bytes", "group", "attempt", "step", "turns", "tokens", "reward", "score", "ended_s", "seconds", "forked_turns")
# SQLite keeps numbers as they are in a column without a type, and turns them into text in one of the type TEXT.
_EPISODES = ", ".join(f'"{name}"' + ("" if name in _NUMBERS else " TEXT") for name in COLUMNS)
SCHEMA = f"""
CREATE TABLE episodes (id INTEGER PRIMARY KEY, {_EPISODES});
CREATE INDEX episodes_episode ON episodes (episode);
CREATE INDEX episodes_group ON episodes ("group");
CREATE TABLE groups (id INTEGER PRIMARY KEY, start, bytes, "group", attempt, task TEXT, verdict TEXT, version,
  ended_s, seconds, members, failures, mean, passed, episodes);
CREATE INDEX groups_group ON groups ("group");
CREATE INDEX groups_ended ON groups (ended_s);
CREATE INDEX groups_task ON groups (task);
CREATE TABLE steps (step PRIMARY KEY, start, bytes, begin_s, live_s);
CREATE TABLE members (step, "group", spare);
CREATE INDEX members_step ON members (step);
CREATE INDEX members_group ON members ("group");
CREATE TABLE annotations (id INTEGER PRIMARY KEY, start, bytes, trajectory TEXT, step);
CREATE INDEX annotations_trajectory ON annotations (trajectory);
CREATE INDEX annotations_step ON annotations (step);
CREATE TABLE requests (id INTEGER PRIMARY KEY, start, bytes, episode TEXT);
CREATE INDEX requests_episode ON requests (episode);
"""
CONDITIONS = {
    **{name: f'"{name}" = ?' for name in ("name", "episode", "group", "agent", "source")},
    "before": "start < ?",
    "started": "step = ?",
    "min_reward": "reward >= ?",
    "max_reward": "reward <= ?",
    "task": "instr(task, ?) > 0",
}
"""Conditions on a recorded trajectory: ``before`` bounds its place (`PART` leaves those of evaluations out), ``started`` is the step that
was next when its group was started, ``task`` a part of its id."""
_ANNOTATION = re.compile(rb'\{"trajectory_id": "((?:[^"\\]|\\.)*)", "step": (\d+)')
"""The beginning of a line of annotations, which spares the reader the rest."""


class Store:
    """The tables of one run; several threads may use them.

    Args:
        folder: Directory of the run.
        pass_score: Score from which a member counts as passed.
    """

    def __init__(self, folder: Path, *, pass_score: float = 1.0) -> None:
        self.records, self._pass_score = folder / TRAJECTORIES, pass_score
        self._files = (self.records, folder / EVAL_TRAJECTORIES)
        # Threads share the connection, because all use of it is under the lock.
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        self._db.executescript(SCHEMA)
        self.lock = threading.RLock()
        self.unreadable: list[tuple[str, int]] = []  # name of the file, and where the line begins
        self._tails = {
            "episodes": self._tail(self._files[0], partial(self._take_records, 0), f"episodes WHERE start < {PART}"),
            "evaluated": self._tail(self._files[1], partial(self._take_records, 1), f"episodes WHERE start >= {PART}"),
            "groups": self._tail(folder / GROUPS, self._take_groups, "groups"),
            "steps": self._tail(folder / STEPS, self._take_steps, "steps", "members"),
            "annotations": self._tail(folder / ANNOTATIONS, self._take_annotations, "annotations"),
            LOGS: self._tail(folder / REQUESTS, self._take_requests, "requests"),
        }
        self._unread_indexes = [*range(len(RECORDS))]

    def _tail(self, path: Path, take: Callable[[Iterable[Line]], None], *tables: str) -> Tail:
        def forget() -> None:
            for rows in tables:
                self._db.execute(f"DELETE FROM {rows}")

        return Tail(path, take, forget)

    def _read_index(self, number: int) -> None:
        tail = self._tails[RECORDS[number]]

        def rows() -> Iterator[list[Any]]:
            for row in read_index(self._files[number]):
                # The file itself is read from behind the last line that the index describes.
                tail.read = row[0] + row[1] + 1
                yield row

        self._add_episodes(number, rows())

    def advance(self, seconds: float = 0.2, names: Iterable[str] = FILES) -> bool:
        """Read the indexes, and on in some files for at most `seconds`; returns True if everything is read."""
        with self.lock:
            while self._unread_indexes:
                self._read_index(self._unread_indexes.pop(0))
        until = time.monotonic() + seconds
        waiting = [self._tails[name] for name in names]
        while waiting:
            # One part of one file at a time, and the lock is free between parts, so that questions are answered meanwhile.
            with self.lock:
                tail = waiting.pop(0)
                if not tail.advance():
                    waiting.append(tail)
            if time.monotonic() > until:
                break
        return not waiting

    def complete(self, names: Iterable[str] = FILES) -> Store:
        """Read some files to their end, and return the tables."""
        while not self.advance(1.0, names):
            pass
        return self

    @property
    def progress(self) -> dict[str, Any]:
        """Bytes of the file of trajectories that are read, and bytes there are."""
        tail = self._tails["episodes"]
        return {"done": tail.done, "bytes": tail.read, "of": tail.size}

    def account(self) -> tuple[int, int]:
        """Return how many episodes of the training are recorded, and how many were played."""
        recorded = self.one("SELECT count(DISTINCT episode) FROM episodes WHERE source = ?", (TRAINING,))
        return recorded, self.one("SELECT coalesce(sum(episodes), 0) FROM groups")

    def query(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows that an SQL query finds."""
        with self.lock:
            # All rows at once, because another thread may change the tables once the lock is free.
            return self._db.execute(sql, values).fetchall()

    def one(self, sql: str, values: Sequence[Any] = ()) -> Any:
        """Return the first value of the first row, `None` if there is none."""
        rows = self.query(sql, values)
        return rows[0][0] if rows else None

    def lines(self, name: str, places: Iterable[tuple[int, int]]) -> list[dict[str, Any]]:
        """Return the JSON objects that stand at places of a file; what cannot be read is left out."""
        read = self.episode_line if name in RECORDS else partial(read_line, self._tails[name].path)
        return [row for place in places if (row := parsed(read(*place))) is not None]

    def episode_line(self, start: int, size: int) -> bytes:
        """Return the line of a recorded trajectory by its place in the table."""
        number, offset = divmod(start, PART)
        return read_line(self._files[number], offset, size)

    def _insert(self, table: str, rows: Iterable[Sequence[Any]]) -> None:
        marks = ", ?" * (len(self._db.execute(f"SELECT * FROM {table} LIMIT 0").description) - 1)
        self._db.executemany(f"INSERT INTO {table} VALUES (NULL{marks})", rows)

    def _take_records(self, number: int, lines: Iterable[Line]) -> None:
        rows = []
        for start, line in lines:
            if (record := parsed(line)) is None:
                self.unreadable.append((self._files[number].name, start))
            else:
                rows.append(index_values(record, start, len(line)))
        self._add_episodes(number, rows)

    def _add_episodes(self, number: int, rows: Iterable[Sequence[Any]]) -> None:
        self._insert("episodes", ((row[0] + number * PART, *row[1:]) for row in rows))

    def _take_groups(self, lines: Iterable[Line]) -> None:
        self._insert("groups", (self._group(start, line, row) for start, line in lines if (row := parsed(line)) is not None))

    def _group(self, start: int, line: bytes, row: Mapping[str, Any]) -> tuple[Any, ...]:
        rewards, scores = ([value for value in row.get(name, ()) if value is not None] for name in ("rewards", "scores"))
        members = len(row.get("rewards", ()))
        return (
            *(start, len(line), row.get("group_id"), row.get("attempt", 0), row.get("task_id"), row.get("verdict")),
            *(row.get("version"), row.get("ended_s"), row.get("group_s"), members, members - len(rewards)),
            *(_mean(rewards), _mean([score >= self._pass_score - 1e-9 for score in scores]), len(set(row.get("episodes", ())))),
        )

    def _take_steps(self, lines: Iterable[Line]) -> None:
        for start, line in lines:
            if (row := parsed(line)) is None or "step" not in row:
                continue
            # A step that is recorded once more, because its run was resumed, replaces its groups.
            self._db.execute("DELETE FROM members WHERE step = ?", (row["step"],))
            values = (row["step"], start, len(line), row.get("begin_s"), row.get("live_s"))
            self._db.execute("INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?)", values)
            pairs = [(row["step"], group, spare) for name, spare in (("groups", 0), ("spare", 1)) for group in row.get(name, ())]
            self._db.executemany("INSERT INTO members VALUES (?, ?, ?)", pairs)

    def _take_annotations(self, lines: Iterable[Line]) -> None:
        heads = ((start, len(line), head) for start, line in lines if (head := _ANNOTATION.match(line)) is not None)
        self._insert("annotations", ((start, size, json.loads(b'"' + head[1] + b'"'), int(head[2])) for start, size, head in heads))

    def _take_requests(self, lines: Iterable[Line]) -> None:
        logs = ((start, len(line), line[: line.find(b",")].rpartition(b": ")[2]) for start, line in lines)  # a log begins with the name
        self._insert("requests", ((start, size, name.strip(b'"').decode("ascii", "replace")) for start, size, name in logs))

    def close(self) -> None:
        """Release the tables."""
        with self.lock:
            self._db.close()


def named(episode: str) -> dict[str, Any]:
    """Return the conditions on the records of an episode by its name, or of a group of the training by its number; none without a name."""
    return {"group": int(episode), "before": PART} if episode.isdecimal() else {"episode": episode}


def conditions(chosen: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Return an SQL condition on recorded trajectories, and its values.

    Args:
        chosen: Names of `CONDITIONS` with their values, ``status`` (one or several with commas), and ``text``, a part of task, prompt,
            label, episode, error or last text; those that are `None` or empty do not count.
    """
    parts, values = ["1"], list[Any]()
    for name, sql in CONDITIONS.items():
        if chosen.get(name) not in (None, ""):
            parts.append(sql)
            values.append(chosen[name])
    if statuses := [status for status in str(chosen.get("status") or "").split(",") if status]:
        parts.append(f"status IN ({', '.join('?' * len(statuses))})")
        values += statuses
    if text := chosen.get("text"):
        columns = ("task", "prompt", "label", "episode", "error", "text")
        parts.append("(" + " OR ".join(f"instr(lower({name}), ?) > 0" for name in columns) + ")")
        values += [str(text).lower()] * len(columns)
    return " AND ".join(parts), values


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
