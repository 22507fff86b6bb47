"""Recorded episodes as rows of a table: which to show, in which order."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.core.types import Status

Record = Mapping[str, Any]

SORTS = ("time", "reward", "score", "turns", "tokens", "task", "status")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a table shows of one trajectory; small, so that many can be held.

    Attributes:
        name: The trajectory's.
        group: Number of its group.
        agent: Name of the agent, in an episode of several.
        step: The step that was next when its group was begun, from 1; in a synchronous run the one that trained on it.
        task: Name of its task.
        status: How it ended.
        turns: Number of turns.
        tokens: Number of sampled tokens.
        reward: `None` if it failed.
        score: `None` if it failed.
        note: The error, else the last thing that the model wrote.
    """

    name: str
    group: int
    agent: str
    step: int
    task: str
    status: str
    turns: int
    tokens: int
    reward: float | None
    score: float | None
    note: str


def row_of(record: Record, *, note_length: int = 200) -> Row:
    """The row of a record, of any age, also of one that was cut or holds something unexpected."""
    turns = [turn for turn in _of(record, "turns", list) if isinstance(turn, Mapping)]
    last = str(turns[-1].get("text", "")) if turns else ""
    version, group = _of(record, "version", int), _of(record, "group_id", int)
    return Row(
        name=str(record.get("trajectory_id", "?")),
        group=group,
        agent=str(record.get("agent", "")),
        step=version + 1,
        task=str(_of(record, "task", dict).get("id", "?")),
        status="cut" if "status" not in record else str(record["status"]),
        turns=len(turns),
        tokens=sum(len(_of(turn, "token_ids", list)) for turn in turns),
        reward=_number(record.get("reward")),
        score=_number(record.get("score")),
        note=str(record.get("error") or last)[:note_length],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which rows to show.

    Attributes:
        statuses: Only these; empty: any.
        task: Only tasks whose name contains this.
        step: Only episodes begun for this step.
        agent: Only this agent's.
        min_reward: Only those with at least this reward.
        max_reward: Only those with at most this reward.
    """

    statuses: tuple[str, ...] = ()
    task: str = ""
    step: int | None = None
    agent: str = ""
    min_reward: float = -math.inf
    max_reward: float = math.inf

    def holds(self, row: Row) -> bool:
        """Whether to show `row`."""
        bounded = self.min_reward > -math.inf or self.max_reward < math.inf
        rewarded = not bounded or (row.reward is not None and self.min_reward <= row.reward <= self.max_reward)
        return (
            rewarded
            and (not self.statuses or row.status in self.statuses)
            and self.task in row.task
            and self.step in (None, row.step)
            and self.agent in ("", row.agent)
        )


@dataclass(slots=True)
class Table:
    """Rows taken in one after another; only as many are held as will be shown.

    Attributes:
        seen: Rows taken in.
        chosen: Rows among them that were chosen.
        statuses: Status -> rows among all taken in.
        rows: The first `limit` of those chosen, in order.
    """

    seen: int = 0
    chosen: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    rows: list[Row] = field(default_factory=list)


def make_table(records: Iterable[Record], choice: Choice, *, sort: str = "time", limit: int = 20) -> Table:
    """Read through records.

    Args:
        records: In order of time.
        choice: Which to show.
        sort: One of `SORTS`, ascending; with a minus before it, descending.
        limit: Rows to hold at most; 0: all.
    """
    table = Table()

    def chosen() -> Iterator[tuple[Any, Row]]:
        for index, record in enumerate(records):
            row = row_of(record)
            table.seen += 1
            table.statuses[row.status] += 1
            if choice.holds(row):
                table.chosen += 1
                yield _key(sort.lstrip("-"))(row, index), row

    descending = sort.startswith("-")
    if limit:
        take: Callable[..., list[tuple[Any, Row]]] = heapq.nlargest if descending else heapq.nsmallest
        found = take(limit, chosen(), key=lambda pair: pair[0])
    else:
        found = sorted(chosen(), key=lambda pair: pair[0], reverse=descending)
    table.rows = [row for _, row in found]
    return table


def _key(sort: str) -> Callable[[Row, int], Any]:
    """What rows are ordered by; rows without a number come first."""

    def key(row: Row, index: int) -> Any:
        value = index if sort == "time" else getattr(row, sort)
        return (-math.inf if value is None else value, index)

    return key


def failures(statuses: Mapping[str, int]) -> int:
    """How many of the rows were not fit to train on."""
    fit = {str(status) for status in Status if status.trainable}
    return sum(count for status, count in statuses.items() if status not in fit)


def _of(record: Record, name: str, kind: type[Any]) -> Any:
    """A field of a certain type, or that type's empty value."""
    value = record.get(name)
    return value if isinstance(value, kind) else kind()


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
