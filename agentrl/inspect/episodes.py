"""Recorded episodes as text, turn by turn, and as a filtered and sorted table."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from agentrl.core.errors import ConfigError
from agentrl.core.types import Status
from agentrl.inspect.directory import METRICS, RunDirectory
from agentrl.inspect.store import PART, conditions, named
from agentrl.track.display import ledger_text
from agentrl.track.index import COLUMNS, Row
from agentrl.track.summary import print_rows, summary_rows
from agentrl.track.text import Screen, counted, number

Record: TypeAlias = Mapping[str, Any]
Pieces: TypeAlias = Callable[[Sequence[int]], list[str]]
"""Function from token ids to the text of each token."""

UNLIKELY = 0.1
"""Tokens sampled with a lower probability are highlighted."""
MAX_LISTED = 8
MAX_ERRORS = 5


def show_episode(
    screen: Screen, records: Sequence[Record], pieces: Pieces | None, *, logprobs: bool = False, forks: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Print an episode.

    Args:
        screen: Where it is printed.
        records: One record per agent.
        pieces: Decodes single tokens; `None` without a tokenizer.
        logprobs: Print the log-probability of every token.
        forks: The episodes that go on from one of its turns, as `agentrl.inspect.episode.forks_of` gives them.
    """
    first = records[0]
    _head(screen, records, forks)
    branches = _branches(records)
    turns = [(agent, turn, _branch_note(place, branches)) for place, (agent, _, own) in enumerate(branches) for turn in own]
    turns = sorted(turns, key=lambda item: int(item[1].get("number", 0)))
    turns += [(str(record.get("agent", "")), record["unanswered"], "not answered") for record in records if record.get("unanswered")]
    for index, (agent, turn, note) in enumerate(turns, start=1):
        shared = int(turn.get("number", 0)) < int(first.get("forked_turns", 0))
        notes = (agent, note, f"shared with {first['forked_from']}" if shared else "")
        title = "  ".join((f"turn {index}", *filter(None, notes)))
        show_turn(screen, title, turn, pieces, logprobs=logprobs)
    if first.get("error"):
        screen.line()
        screen.line((str(first["error"]), "red"))


def _branches(records: Sequence[Record]) -> list[tuple[str, str, list[Record]]]:
    """Branches of an episode, in the order of their first turns: agent, reason, and turns."""
    found: list[tuple[str, str, list[Record]]] = []
    for record in records:
        for index, turn in enumerate(record.get("turns", ())):
            if not index or turn.get("fresh"):
                found.append((str(record.get("agent", "")), str(turn.get("branch_reason", "")), []))
            found[-1][2].append(turn)
    return sorted(found, key=lambda branch: int(branch[2][0].get("number", 0)))


def _branch_note(place: int, branches: Sequence[tuple[str, str, list[Record]]]) -> str:
    """The name of a branch, if there is more than one and agents do not tell them apart."""
    return f"branch {place + 1}" if len(branches) > len({agent for agent, _, _ in branches}) else ""


def _branch_rows(branches: Sequence[tuple[str, str, list[Record]]]) -> list[tuple[str, str]]:
    """A row per branch for the head of an episode: why it was opened, its turns, and why it is not trained."""
    rows = []
    for place, (agent, reason, turns) in enumerate(branches):
        if name := _branch_note(place, branches):
            untrained = f", not trained: {turns[0]['masked']}" if turns[0].get("masked") else ""
            opened = f" opened because of {reason!r}" if reason else ""
            helper = f", a helper's: {turns[0]['helper']}" if turns[0].get("helper") else ""
            rows.append((name, f"{f'{agent}  ' if agent else ''}{counted(len(turns), 'turn')}{opened}{helper}{untrained}"))
    return rows


def _fork_rows(record: Record, forks: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Rows for the head of an episode: the one from which it was forked, and those that were forked from it."""
    rows = []
    if record.get("forked_from"):
        rows.append(("forked", f"from {record['forked_from']} after {counted(record['forked_turns'], 'turn')}"))
    for turns, same in itertools.groupby(forks, key=lambda fork: fork["turns"]):
        rows.append(("forks", f"{', '.join(str(fork['episode']) for fork in same)} go on after {counted(turns, 'turn')}"))
    return rows


def _head(screen: Screen, records: Sequence[Record], forks: Sequence[Mapping[str, Any]]) -> None:
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
    rows += _fork_rows(first, forks)
    rows += [("metadata", str(task["metadata"]))] if task.get("metadata") else []
    for record in records:
        who = f"{record['agent']}  " if record.get("agent") else ""
        parts = "".join(f"  {name} {value:.6g}" for name, value in record.get("reward_parts", {}).items())
        rows.append(("reward", f"{who}{_number(record.get('reward'))}  score {_number(record.get('score'))}{parts}"))
    rows += _branch_rows(_branches(records))
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
    # Pieces are shown only if they add up to the text; another tokenizer would spell other tokens.
    if len(spelled) == len(values) and "".join(spelled) == turn["text"]:
        screen.line(*((piece, _style(value)) for piece, value in zip(spelled, values, strict=True)), indent=2)
    else:
        screen.line(turn["text"], indent=2)
    if turn.get("rewritten"):
        screen.line(("rewritten by the client ", "cyan"), str(turn["rewritten"]), indent=4)
    info = "".join(f"  {name} {_number(value)}" for name, value in turn.get("info", {}).items())
    screen.line(("reward ", "cyan"), f"{_number(turn['reward'])}{info}", indent=4)
    show_logprobs(screen, values, spelled or [str(token) for token in turn["token_ids"]], every=logprobs)


def show_logprobs(screen: Screen, values: Sequence[float], spelled: Sequence[str], *, every: bool = False) -> None:
    """Print the mean log-probability and the unlikely tokens, or every token; one value and one text per token."""
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


ROW = ", ".join(f'"{name}"' for name in COLUMNS[2:])
SORTS = ("time", "reward", "score", "turns", "tokens", "task", "status")


@dataclass(slots=True)
class EpisodeTable:
    """Table of episodes that holds only the rows to show."""

    seen: int
    chosen: int  # met the filter; `rows` are the first of these
    statuses: Mapping[str, int]  # of all, the most frequent first
    rows: list[Row]
    account: tuple[int, int] = (0, 0)  # episodes of the training that are recorded and that were played, if that is known


def make_table(run: RunDirectory, chosen: Mapping[str, Any], *, group: str = "", sort: str = "time", limit: int = 20) -> EpisodeTable:
    """Return the table of the recorded trajectories of a training, or of one of its groups.

    Args:
        run: The run.
        chosen: Conditions of `agentrl.inspect.store.conditions` that a row must meet.
        group: Number of the group.
        sort: One of `SORTS`, with a minus descending; rows without a number are below others.
        limit: Rows at most; 0: all.

    Raises:
        ConfigError: If the run recorded no trajectories.
    """
    store = run.recorded()
    within, values = conditions({"before": PART, **named(group)})
    counts = f"SELECT status, count(*) FROM episodes WHERE {within} GROUP BY status ORDER BY 2 DESC, min(id)"
    statuses = dict(store.query(counts, values))
    where, more = conditions(chosen)
    rows, values = f"FROM episodes WHERE {within} AND {where}", [*values, *more]
    # Rows are numbered in the order of the file, in which episodes stand as they ended.
    by, direction = sort.lstrip("-").replace("time", "id"), "DESC" if sort.startswith("-") else "ASC"
    sql = f"SELECT {ROW} {rows} ORDER BY {by} {direction}, id {direction} LIMIT ?"
    return EpisodeTable(
        seen=sum(statuses.values()),
        chosen=store.one(f"SELECT count(*) {rows}", values),
        statuses=statuses,
        rows=[Row(*row) for row in store.query(sql, (*values, limit or -1))],
        account=(0, 0) if group else store.complete(("groups",)).account(),
    )


def failures(statuses: Mapping[str, int]) -> int:
    """Return the number of rows that could not be trained on."""
    fit = {str(status) for status in Status if status.trainable}
    return sum(count for status, count in statuses.items() if status not in fit)


def show_run(run: RunDirectory, screen: Screen) -> None:
    """Print settings, rewards and counts of groups, from the summary, or from the metrics of an unfinished run."""
    agent = ""
    try:
        config = run.config()
        agent = config.run.agent
        mode = f"staleness up to {config.flow.staleness}" if config.flow.staleness else "synchronous"
        model = config.model.model or "the bundled tiny model"
        screen.labelled("run", f"{agent} with {model}, {Path(config.algo.advantage_estimator).name}, {mode}, seed {config.run.seed}")
    except ConfigError as error:
        screen.line((str(error), "yellow"), prose=True)
    metrics, summary = run.steps(), run.summed_up()
    if summary:
        rows = summary_rows({**summary, "paths": {}}, rewards=[row["reward/mean"] for row in metrics], agent=agent, unicode=screen.unicode)
        print_rows(screen, (row for row in rows if row[0] not in ("saved", "recorded")))  # the table of episodes says what is recorded
    else:
        screen.line((f"no step: {METRICS} is missing or empty", "yellow"))
    dropped = {name.partition("/")[2]: value for name, value in (metrics[-1] if metrics else {}).items() if name.startswith("dropped/")}
    for reason, count in dropped.items():
        screen.labelled("dropped", f"{number(count, 0)}: {reason}")
    if metrics and not summary.get("ledger"):
        screen.labelled("groups", ledger_text(metrics[-1]))


def show_table(screen: Screen, table: EpisodeTable, *, group: str = "", sort: str = "time", by_status: bool = False) -> None:
    """Print a table of episodes; the other arguments say how its rows were chosen and sorted."""
    if not table.seen:
        screen.line(("no episodes are recorded" + (f" of group {group}" if group else ""), "yellow"))
        return
    counts = ", ".join(f"{count} {status}" for status, count in table.statuses.items())
    recorded, played = table.account
    episodes = f"{recorded} of {counted(played, 'episode')}" if played else counted(table.seen, "episode")
    screen.labelled("recorded", f"{episodes}: {counts}")
    if not table.rows:
        screen.line(("none of them is chosen", "yellow"))
        return
    screen.line()
    several, forked = (any(getattr(row, name) for row in table.rows) for name in ("agent", "forked_from"))
    more = (*(("agent",) if several else ()), *(("forked from",) if forked else ()))
    columns = ("episode", *more, "step#", "task", "status", "turns#", "tokens#", "reward#", "score#", "last text")
    screen.table(columns, [_cells(row, several=several, forked=forked) for row in table.rows])
    screen.line()
    if len(table.rows) < table.chosen:
        screen.line(f"{len(table.rows)} of {table.chosen} shown, by {sort} (--limit 0 shows all).")
    failed = failures(table.statuses)
    if failed and not by_status:
        screen.line(f"{failed} failed: --status env_error timeout engine_error shows them.")
    _show_errors(screen, table.rows)


def _show_errors(screen: Screen, rows: Sequence[Row]) -> None:
    """Print each error of the rows once, with an episode that has it."""
    errors = Counter(row.error for row in rows if row.error)
    for error, number_of in errors.most_common(MAX_ERRORS):
        first = next(row for row in rows if row.error == error)
        screen.labelled(first.status, f"{counted(number_of, 'episode')}, such as {first.name}: {error}", "red")
    if len(errors) > MAX_ERRORS:
        screen.line(f"There are {len(errors) - MAX_ERRORS} more errors; `agentrl inspect RUN EPISODE` shows that of an episode.")


def _cells(row: Row, *, several: bool, forked: bool) -> list[str | tuple[str, str]]:
    style = {"finished": "", "truncated": "yellow"}.get(row.status, "red")
    reward, score = ("none" if value is None else number(value) for value in (row.reward, row.score))
    origin = f"{row.forked_from}, {counted(row.forked_turns, 'turn')}" if row.forked_from else ""
    more = (*((row.agent,) if several else ()), *((origin,) if forked else ()))
    return [row.name, *more, str(row.step), row.task, (row.status, style), str(row.turns), str(row.tokens), reward, score, row.text]
