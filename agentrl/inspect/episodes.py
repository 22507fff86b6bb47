"""Recorded episodes as text, turn by turn, and as a filtered and sorted table."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from agentrl.core.errors import ConfigError
from agentrl.core.types import Status
from agentrl.inspect.directory import METRICS, RunDirectory
from agentrl.track.display import ledger_text
from agentrl.track.summary import summary_rows
from agentrl.track.text import Screen, number

Record: TypeAlias = Mapping[str, Any]
Pieces: TypeAlias = Callable[[Sequence[int]], list[str]]
"""Function from token ids to the text of each token."""

UNLIKELY = 0.1
"""Tokens sampled with a lower probability are highlighted."""
MAX_LISTED = 8
LABEL_WIDTH = 11


def show_episode(screen: Screen, records: Sequence[Record], pieces: Pieces | None, *, logprobs: bool = False) -> None:
    """Print an episode.

    Args:
        screen: Screen to print on.
        records: Records of the episode, one per agent.
        pieces: Decoder of single tokens; `None` without a tokenizer.
        logprobs: Print the log-probability of every sampled token.
    """
    first = records[0]
    _head(screen, records)
    turns = [(str(record.get("agent", "")), turn, "") for record in records for turn in record.get("turns", ())]
    turns = sorted(turns, key=lambda item: int(item[1].get("number", 0)))
    turns += [(str(record.get("agent", "")), record["unanswered"], "not answered") for record in records if record.get("unanswered")]
    for index, (agent, turn, note) in enumerate(turns, start=1):
        title = f"turn {index}" + (f"  {agent}" if agent else "") + (f"  {note}" if note else "")
        show_turn(screen, title, turn, pieces, logprobs=logprobs)
    if first.get("error"):
        screen.line()
        screen.line((str(first["error"]), "red"))


def _head(screen: Screen, records: Sequence[Record]) -> None:
    first = records[0]
    task = first.get("task", {})
    if first.get("clipped"):
        screen.line(("The record was cut, because it was too long.", "yellow"))
    version = f"weights of version {first.get('version', '?')} at its beginning, attempt {int(first.get('attempt', 0)) + 1}"
    rows = [
        ("episode", f"{first.get('episode_id', '?')}  group {first.get('group_id', '?')}, {version}"),
        ("task", f"{task.get('id', '?')}  epoch {task.get('epoch', '?')}, position {task.get('position', '?')}"),
        ("label", str(task.get("literals", {}).get("label", task.get("label")))),
        ("status", str(first.get("status", "?"))),
    ]
    rows += [("metadata", str(task["metadata"]))] if task.get("metadata") else []
    for record in records:
        who = f"{record['agent']}  " if record.get("agent") else ""
        parts = "".join(f"  {name} {value:.6g}" for name, value in record.get("reward_parts", {}).items())
        rows.append(("reward", f"{who}{_number(record.get('reward'))}  score {_number(record.get('score'))}{parts}"))
    metrics = "  ".join(f"{name} {_number(value)}" for name, value in first.get("metrics", {}).items())
    rows += [("metrics", metrics)] if metrics else []
    timings = "  ".join(f"{name.removesuffix('_s')} {value:.3g} s" for name, value in first.get("timings", {}).items())
    rows += [("time", timings)] if timings else []
    for label, text in rows:
        screen.line((f"{label:<10}", "bold cyan"), text, indent=0)


def show_turn(screen: Screen, title: str, turn: Record, pieces: Pieces | None, *, logprobs: bool = False) -> None:
    """Print the prompt, the completion and the reward of a turn."""
    values, versions = turn["logprobs"], sorted(set(turn["versions"]))
    spelled = pieces(turn["token_ids"]) if pieces is not None else []
    screen.line()
    screen.line((title, "bold"), (f"  {_facts(turn, versions)}", "dim"))
    screen.line((turn["prompt_text"], "dim"), indent=4)
    if len(spelled) == len(values) and "".join(spelled) == turn["text"]:
        screen.line(*((piece, _style(value)) for piece, value in zip(spelled, values, strict=True)), indent=2)
    else:
        screen.line(turn["text"], indent=2)
    info = "".join(f"  {name} {_number(value)}" for name, value in turn.get("info", {}).items())
    screen.line(("reward ", "cyan"), f"{_number(turn['reward'])}{info}", indent=4)
    show_logprobs(screen, values, spelled or [str(token) for token in turn["token_ids"]], every=logprobs)


def show_logprobs(screen: Screen, values: Sequence[float], spelled: Sequence[str], *, every: bool = False) -> None:
    """Print the mean log-probability and the unlikely tokens, or every token.

    Args:
        screen: Screen to print on.
        values: One log-probability per token.
        spelled: One text per token.
        every: Print every token.
    """
    if not values:
        return
    parts: list[str | tuple[str, str]] = [("log-probability ", "cyan"), f"mean {sum(values) / len(values):.3f}, lowest {min(values):.3f}"]
    pairs = list(zip(spelled, values, strict=True))
    unlikely = sorted((pair for pair in pairs if math.exp(pair[1]) < UNLIKELY), key=lambda pair: pair[1])
    if unlikely and not every:
        parts.append("; unlikely: ")
        for index, (piece, value) in enumerate(unlikely[:MAX_LISTED]):
            parts += [", " if index else "", (repr(piece), _style(value)), f" {100 * math.exp(value):.2g}%"]
        parts += [f" and {len(unlikely) - MAX_LISTED} more"] if len(unlikely) > MAX_LISTED else []
    screen.line(*parts, indent=4)
    for start in range(0, len(pairs) if every else 0, MAX_LISTED):
        row: list[str | tuple[str, str]] = []
        for piece, value in pairs[start : start + MAX_LISTED]:
            row += [(repr(piece), _style(value)), f" {value:.3f}   "]
        screen.line(*row, indent=4)


def _facts(turn: Record, versions: Sequence[int]) -> str:
    count = len(turn["token_ids"])
    version = f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}" if versions else "no version"
    read = f"{len(turn['prompt_ids'])} tokens read"
    return f"{read}, {count} sampled by {version} at temperature {turn['temperature']:g}, ended by {turn['finish_reason']}"


def _style(logprob: float) -> str:
    probability = math.exp(logprob)
    return "bold red" if probability < UNLIKELY / 10 else "yellow" if probability < UNLIKELY else ""


def _number(value: Any) -> str:
    return "none" if value is None else f"{value:.6g}" if isinstance(value, int | float) else str(value)


SORTS = ("time", "reward", "score", "turns", "tokens", "task", "status")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Table row of one trajectory; small, so that many fit in memory.

    Attributes:
        name: Name of the trajectory.
        group: Number of its group.
        agent: Name of the agent, in an episode of several.
        step: Next step when the group was started, from 1; in a synchronous run the step that trained on the group.
        task: Name of its task.
        status: Status at the end of the episode.
        turns: Number of turns.
        tokens: Number of sampled tokens.
        reward: Reward; `None` if the episode failed.
        score: Score; `None` if the episode failed.
        note: The error, else the text of the last turn.
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
    """Return the row of a record; also of an old, cut or malformed record."""
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
        reward=_as_number(record.get("reward")),
        score=_as_number(record.get("score")),
        note=str(record.get("error") or last)[:note_length],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Filter of rows; a row must meet every condition.

    Attributes:
        statuses: Accepted statuses; empty: any.
        task: Text that the task's name must contain.
        step: Required step; `None`: any.
        agent: Required agent; empty: any.
        min_reward: Lowest accepted reward.
        max_reward: Highest accepted reward.
    """

    statuses: tuple[str, ...] = ()
    task: str = ""
    step: int | None = None
    agent: str = ""
    min_reward: float = -math.inf
    max_reward: float = math.inf

    def holds(self, row: Row) -> bool:
        """Return True if `row` meets every condition."""
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
class EpisodeTable:
    """Table of episodes that holds only the rows to show.

    Attributes:
        seen: Number of records read.
        chosen: Number of records that met the filter.
        statuses: Status -> number of records read.
        rows: The first `limit` of the chosen rows, in order.
    """

    seen: int = 0
    chosen: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    rows: list[Row] = field(default_factory=list)


def make_table(records: Iterable[Record], choice: Choice, *, sort: str = "time", limit: int = 20) -> EpisodeTable:
    """Read all records and return the table.

    Args:
        records: Records in order of time.
        choice: Filter of rows.
        sort: One of `SORTS`, ascending; with a minus before it, descending.
        limit: Maximum number of rows; 0: all.
    """
    table = EpisodeTable()

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
    """Return the sort key; rows without a number come first."""

    def key(row: Row, index: int) -> Any:
        value = index if sort == "time" else getattr(row, sort)
        return (-math.inf if value is None else value, index)

    return key


def failures(statuses: Mapping[str, int]) -> int:
    """Return the number of rows that could not be trained on."""
    fit = {str(status) for status in Status if status.trainable}
    return sum(count for status, count in statuses.items() if status not in fit)


def _of(record: Record, name: str, kind: type[Any]) -> Any:
    """Return a field if it has the type `kind`, else the empty value of that type."""
    value = record.get(name)
    return value if isinstance(value, kind) else kind()


def _as_number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def show_run(run: RunDirectory, screen: Screen) -> None:
    """Print settings, rewards and counts of groups, from the summary, or from the metrics of an unfinished run."""
    agent = ""
    try:
        config = run.config()
        agent = config.run.agent
        mode = f"staleness up to {config.flow.staleness}" if config.flow.staleness else "synchronous"
        model = config.model.model or "the bundled tiny model"
        _labelled(screen, "run", f"{agent} with {model}, {Path(config.algo.advantage_estimator).name}, {mode}, seed {config.run.seed}")
    except ConfigError as error:
        screen.line((str(error), "yellow"))
    metrics = [{name: value for name, value in row.items() if value is not None} for row in run.metrics()]
    metrics = [row for row in metrics if "reward/mean" in row]
    summary = run.summed_up()
    if summary:
        rows = summary_rows({**summary, "paths": {}}, rewards=[row["reward/mean"] for row in metrics], agent=agent, unicode=screen.unicode)
        for label, text in rows:
            if label != "saved":
                _labelled(screen, label, text)
    else:
        screen.line((f"no step: {METRICS} is missing or empty", "yellow"))
    dropped = {name.partition("/")[2]: value for name, value in (metrics[-1] if metrics else {}).items() if name.startswith("dropped/")}
    for reason, count in dropped.items():
        _labelled(screen, "dropped", f"{number(count, 0)}: {reason}")
    if metrics and not summary.get("ledger"):
        _labelled(screen, "groups", ledger_text(metrics[-1]))


def _labelled(screen: Screen, label: str, text: str) -> None:
    screen.line((f"{label:<{LABEL_WIDTH}}", "bold cyan"), text)


def show_table(screen: Screen, table: EpisodeTable, *, group: str = "", sort: str = "time", by_status: bool = False) -> None:
    """Print a table of episodes.

    Args:
        screen: Where to.
        table: The rows.
        group: The group that the rows were chosen by; empty: none.
        sort: The order of the rows.
        by_status: Whether the rows were chosen by their status.
    """
    if not table.seen:
        screen.line(("no episodes are recorded" + (f" of group {group}" if group else ""), "yellow"))
        return
    counts = ", ".join(f"{count} {status}" for status, count in table.statuses.most_common())
    _labelled(screen, "recorded", f"{table.seen} episodes: {counts}")
    if not table.rows:
        screen.line(("none of them is chosen", "yellow"))
        return
    screen.line()
    several = any(row.agent for row in table.rows)
    columns = (
        "episode",
        *(("agent",) if several else ()),
        "step#",
        "task",
        "status",
        "turns#",
        "tokens#",
        "reward#",
        "score#",
        "last text or error",
    )
    screen.table(columns, [_cells(row, several=several) for row in table.rows])
    screen.line()
    if len(table.rows) < table.chosen:
        screen.line(f"{len(table.rows)} of {table.chosen} shown, by {sort} (--limit 0 shows all).")
    failed = failures(table.statuses)
    if failed and not by_status:
        screen.line(f"{failed} failed: --status env_error timeout engine_error shows them.")


def _cells(row: Row, *, several: bool) -> list[str | tuple[str, str]]:
    style = {"finished": "", "truncated": "yellow"}.get(row.status, "red")
    return [
        row.name,
        *((row.agent,) if several else ()),
        str(row.step),
        row.task,
        (row.status, style),
        str(row.turns),
        str(row.tokens),
        number(row.reward) if row.reward is not None else "none",
        number(row.score) if row.score is not None else "none",
        row.note,
    ]
