"""The index beside ``trajectories.jsonl``: a line for each record, so that a reader finds and lists records without reading them.

The first line names the file and the columns; every further one is an array of their values. The recorder writes it along; a reader
that finds none, or one that is behind, reads the records themselves from there on.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from agentrl.core.errors import StorageError
from agentrl.core.files import complete_file
from agentrl.track.jsonl import JsonLines, encode

Record: TypeAlias = Mapping[str, Any]

_log = logging.getLogger(__name__)

FORMAT = 1
MAX_ERROR, MAX_TEXT = 400, 200
TRAINING = "train"
"""Source of the episodes that were played to train on; those of evaluations have the name of the evaluation."""


@dataclass(frozen=True, slots=True)
class Row:
    """Facts that a list shows of one recorded trajectory; small, so that many fit in memory."""

    name: str  # of the trajectory
    episode: str
    group: int
    attempt: int
    agent: str
    step: int  # from 1, the next one when the group was started: in a synchronous run the one that trained on it
    task: str
    source: str  # `TRAINING`, or the name of an evaluation
    status: str
    turns: int
    tokens: int  # sampled
    reward: float | None
    score: float | None
    ended_s: float | None  # when the group ended, in seconds since 1970
    seconds: float | None  # of the episode
    error: str  # first line of what went wrong; empty if nothing did
    text: str  # text of the last turn
    forked_from: str  # episode whose first turns it shares; empty if it was played from its beginning
    forked_turns: int  # how many of them
    prompt: str = ""  # beginning of the task's prompt, of the last message of a chat
    label: str = ""  # of the task, as text
    label_type: str = ""  # its type in Python; empty if there is no label


def row_of(record: Record) -> Row:
    """Return the row of a record; also of an old, cut or malformed record."""
    turns = [turn for turn in _of(record, "turns", list) if isinstance(turn, Mapping)]
    task = _of(record, "task", dict)
    name = _text(record.get("trajectory_id", "?"))
    return Row(
        name=name,
        episode=_text(record.get("episode_id", name)),
        group=_of(record, "group_id", int),
        attempt=_of(record, "attempt", int),
        agent=_text(record.get("agent", "")),
        step=_of(record, "version", int) + 1,
        task=_text(task.get("id", "?")),
        source=_text(_of(record, "eval_sampling", dict).get("name", TRAINING)),
        status=_text(record.get("status", "cut")),
        turns=len(turns),
        tokens=sum(len(_of(turn, "token_ids", list)) for turn in turns),
        reward=_as_number(record.get("reward")),
        score=_as_number(record.get("score")),
        ended_s=_as_number(record.get("ended_s")),
        seconds=_as_number(_of(record, "timings", dict).get("total_s")),
        error=_text(record.get("error") or "").partition("\n")[0][:MAX_ERROR],
        text=_text(turns[-1].get("text", ""))[:MAX_TEXT] if turns else "",
        forked_from=_text(record.get("forked_from") or ""),
        forked_turns=_of(record, "forked_turns", int),
        prompt=_asked(task.get("prompt"))[:MAX_TEXT],
        label=_shown(task, "label")[:MAX_TEXT],
        label_type=type_name(task, "label"),
    )


def _asked(prompt: Any) -> str:
    """Return the text of a prompt, of a chat that of its last message, in which parts that are no text have no place."""
    last = prompt[-1] if isinstance(prompt, list) and prompt else prompt
    content = last.get("content") if isinstance(last, Mapping) else last
    if isinstance(content, list):
        content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return _text("" if content is None else content).strip()


def _shown(task: Record, name: str) -> str:
    """Return a value of a task as text: what JSON does not know in the form of Python, as it is recorded."""
    literal = _of(task, "literals", dict).get(name)
    value = task.get(name) if literal is None else literal
    return _text("" if value is None else value if isinstance(value, str) else json.dumps(value))


def type_name(task: Record, name: str) -> str:
    """Return the name of the type in Python of a value of a task; empty if there is none."""
    literal, value = _of(task, "literals", dict).get(name), task.get(name)
    if isinstance(literal, str):
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(literal)
    return "" if value is None else type(value).__name__


COLUMNS = ("start", "bytes", *(field.name for field in fields(Row)))
"""Values of a line of the index: where the record begins and how long it is, without its newline; then its row."""
LATER = [field.default for field in fields(Row) if field.default is not MISSING]
"""Values of the columns that an index of an earlier version lacks."""
FIRST_COLUMNS = len(COLUMNS) - len(LATER)


def index_path(records: Path) -> Path:
    """Return the path of the index of a file of records."""
    return records.with_suffix(".index.jsonl")


def index_values(record: Record, start: int, size: int) -> list[Any]:
    """Return the values of a record's line in the index."""
    return [start, size, *asdict(row_of(record)).values()]


def read_index(records: Path) -> Iterator[list[Any]]:
    """Yield the values of each line of the index, as far as it fits its file; nothing if there is none, or it is of another format.

    A line that was cut off by a crash, or of a record that does not end where it says, is left out, and so is whatever follows it.
    """
    with contextlib.ExitStack() as opened:
        try:
            file, described = (opened.enter_context(path.open("rb")) for path in (index_path(records), records))
        except OSError:
            return
        opened.enter_context(contextlib.suppress(ValueError, TypeError, OSError))
        head, end = json.loads(file.readline()), 0
        if not isinstance(head, dict) or head.get("format") != FORMAT or (known := len(head.get("columns", ()))) < FIRST_COLUMNS:
            return
        if tuple(head["columns"]) != COLUMNS[:known]:
            return
        for line in file:
            values = json.loads(line) if line.endswith(b"\n") else None
            if not isinstance(values, list) or len(values) != known:
                return
            values += LATER[known - FIRST_COLUMNS :]
            if values[0] < end or os.pread(described.fileno(), 1, values[0] + values[1]) != b"\n":
                return
            end = values[0] + values[1] + 1
            yield values


def num_episodes(records: Path) -> int:
    """Return how many episodes the index of a file of records lists; those of an episode's agents follow each other."""
    place = COLUMNS.index("episode")
    return sum(1 for _ in itertools.groupby(values[place] for values in read_index(records)))


def write_index(records: Path, lines: Iterator[list[Any]]) -> None:
    """Write the index of a file of records anew, whole or not at all; `lines` are the values of each."""
    with complete_file(index_path(records)) as partial, partial.open("w", encoding="ascii") as file:
        file.write(_head(records) + "\n")
        for values in lines:
            file.write(encode(values) + "\n")


def scan_records(records: Path) -> Iterator[list[Any]]:
    """Yield the values of the index's lines from the records themselves; lines that are no records, and a cut last one, are left out."""
    with records.open("rb") as file:
        start = 0
        for line in file:
            if line.endswith(b"\n") and (record := parsed(line)) is not None:
                yield index_values(record, start, len(line) - 1)
            start += len(line)


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; `None` if it is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class IndexWriter:
    """Appends to the index what is appended to its file; begins by bringing the index up to date with the file."""

    def __init__(self, records: Path) -> None:
        self._end = records.stat().st_size if records.exists() else 0
        if self._end and not self._is_whole(records):
            write_index(records, scan_records(records))
        # An index without records belongs to a file that is gone.
        elif not self._end:
            index_path(records).unlink(missing_ok=True)
        self._lines, self._behind = JsonLines(index_path(records)), False
        if not self._end:
            self._lines.write(_head(records))

    def add(self, record: Record, size: int) -> None:
        """Append the line of a record that was appended to the file with `size` bytes and a newline; the first that fails is the last."""
        try:
            if not self._behind:
                self._lines.write(encode(index_values(record, self._end, size)))
        except StorageError as error:
            self._behind = True  # readers find the rest in the records
            _log.warning("%s; the run goes on without its index", error)
        self._end += size + 1

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._lines.close()

    def _is_whole(self, records: Path) -> bool:
        """Return True if the index has all columns, says of every record where it is, and has no line of one that is no longer there."""
        ends = [values[0] + values[1] + 1 for values in read_index(records)]
        if not ends or ends[-1] != self._end:
            return False
        with index_path(records).open("rb") as file:
            complete = json.loads(file.readline()).get("columns") == list(COLUMNS)
            return complete and sum(1 for _ in file) == len(ends)


def _head(records: Path) -> str:
    return encode({"index_of": records.name, "format": FORMAT, "columns": COLUMNS})


def _of(record: Record, name: str, kind: type[Any]) -> Any:
    """Return a field if it has the type `kind`, else the empty value of that type."""
    value = record.get(name)
    return value if isinstance(value, kind) else kind()


def _text(value: Any) -> str:
    """Return a value as text without halves of characters, which JSON can hold and SQLite cannot."""
    return str(value).encode("utf-8", "replace").decode()


def _as_number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
