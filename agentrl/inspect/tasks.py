"""Results of tasks over the training, and in evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.inspect.episode import task_answer
from agentrl.inspect.groups import find_group, find_groups
from agentrl.inspect.reader import RunReader
from agentrl.track.index import TRAINING

SORTS = ("hardest", "easiest", "improved", "worsened", "task", "episodes")
MAX_POINTS = 50
MAX_GROUPS = 200
ENDS = 3
"""A task's first and last groups are as many, or fewer where it has fewer than twice that."""


def task_list(run: RunReader, *, offset: int = 0, limit: int = 100, sort: str = "hardest", text: str = "") -> dict[str, Any]:
    """Return a page of the tasks, each with its means over the training.

    Raises:
        ConfigError: If there is no such order.
    """
    if sort not in SORTS:
        raise ConfigError("sort", sort, "is no order", f"Choose {', '.join(SORTS)}.")
    points, exact = _points(run)
    rows = [_row(task, values) for task, values in points.items() if text.lower() in task.lower()]
    missing = float("inf")
    keys: Mapping[str, Any] = {
        "hardest": lambda row: (_or(row["pass"], missing), _or(row["reward"], missing)),
        "easiest": lambda row: (-_or(row["pass"], -missing), -_or(row["reward"], -missing)),
        "improved": lambda row: -_or(row["change"], -missing),
        "worsened": lambda row: _or(row["change"], missing),
        "task": lambda row: row["task"],
        "episodes": lambda row: -row["episodes"],
    }
    rows.sort(key=keys[sort])
    source = "groups" if exact else "recorded"
    return {"of": len(points), "chosen": len(rows), "source": source, "rows": rows[offset : offset + limit]}


def _or(value: float | None, missing: float) -> float:
    return missing if value is None else value


def _points(run: RunReader) -> tuple[dict[str, list[tuple[Any, ...]]], bool]:
    """Groups of each task in order: step, mean reward, share passed, members, failures, verdict; and if all members are counted."""
    sql = (
        "SELECT g.task, coalesce(m.step, g.version + 1), g.mean, g.passed, g.members, g.failures, g.verdict FROM groups g "
        'LEFT JOIN members m ON m."group" = g."group" AND m.spare = 0 WHERE g.task IS NOT NULL ORDER BY g.id'
    )
    rows = run.store.query(sql)
    if not rows:
        sql = (
            "SELECT task, step, avg(reward), avg(score >= 1.0 - 1e-9), count(*), sum(reward IS NULL), NULL FROM episodes "
            'WHERE source = ? GROUP BY task, "group" ORDER BY min(id)'
        )
        rows = run.store.query(sql, (_source(run),))
    points: dict[str, list[tuple[Any, ...]]] = {}
    for task, *values in rows:
        points.setdefault(task, []).append(tuple(values))
    return points, bool(run.store.one("SELECT 1 FROM groups LIMIT 1"))


def _source(run: RunReader) -> str:
    """The source of the recorded episodes that count: the training, or in the directory of an evaluation that."""
    # SQLite sorts false before true, so the training comes first.
    return str(run.store.one("SELECT source FROM episodes ORDER BY source != ? LIMIT 1", (TRAINING,)) or TRAINING)


def _row(task: str, points: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    size = max(1, min(ENDS, len(points) // 2))
    rewards, passed = [[point[place] for point in points] for place in (1, 2)]
    first, last = _mean(rewards[:size]), _mean(rewards[-size:])
    every = max(1, -(-len(points) // MAX_POINTS))
    curve = [
        [points[start][0], _mean(rewards[start : start + every]), _mean(passed[start : start + every])]
        for start in range(0, len(points), every)
    ]
    several = len(points) > 1
    return {
        "task": task,
        "groups": len(points),
        "episodes": sum(point[3] or 0 for point in points),
        "reward": _mean(rewards),
        "first": first,
        "last": last,
        "change": last - first if several and first is not None and last is not None else None,
        "pass": _mean(passed),
        "pass_first": _mean(passed[:size]),
        "pass_last": _mean(passed[-size:]),
        "failures": sum(point[4] or 0 for point in points),
        "filtered": sum(point[5] == "filtered" for point in points),
        "curve": curve,
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def one_task(run: RunReader, task: str) -> dict[str, Any]:
    """Return a task with its groups, the last ones if there are many.

    Raises:
        ConfigError: If no group of it ended.
    """
    points, _ = _points(run)
    if task not in points:
        raise ConfigError("TASK", task, "was not played", "The list of tasks names those that were.")
    sql = 'SELECT DISTINCT "group" FROM {} WHERE task = ?{} ORDER BY 1 DESC LIMIT ?'
    groups = [row[0] for row in run.store.query(sql.format("groups", ""), (task, MAX_GROUPS))]
    source = TRAINING if groups else _source(run)
    groups = groups or [row[0] for row in run.store.query(sql.format("episodes", " AND source = ?"), (task, source, MAX_GROUPS))]
    place = run.store.query("SELECT start, bytes FROM episodes WHERE task = ? ORDER BY id DESC LIMIT 1", (task,))
    records = run.store.lines("episodes", place)
    info = task_answer(records[0]) if records else {}
    found = find_groups(run, groups[::-1]) if source == TRAINING else [find_group(run, group, source=source) for group in groups[::-1]]
    return {**_row(task, points[task]), "info": info, "source": source, "groups": [facts.row() for facts in found]}


def evaluation_answer(run: RunReader) -> dict[str, Any]:
    """Return the evaluations, and what became of each task from one to the next.

    Those of a training are told apart by their steps. In the directory of `agentrl eval` the baseline, if there is one, is number 0, and
    the model number 1; ``differences`` are those between them, by figure.
    """
    lines, measured = run.evaluations, run.measured
    if not lines and measured:
        models = {0: measured.get("baseline"), 1: measured.get("model")}
        lines = [{**_named(values, number), "step": number} for number, values in models.items() if values]
    rows = [
        {
            "label": line.get("label") or f"step {line.get('step')}",
            "source": line.get("source", f"eval-{line.get('step')}"),
            **{
                name: line.get(name) for name in ("step", "seconds", "tasks", "episodes", "failed_episodes", "tokens", "turns", "truncated")
            },
            "figures": line.get("overall") or {},
            "kinds": line.get("by_kind") or {},
            "agents": line.get("by_agent") or {},
            "causes": line.get("causes") or {},
        }
        for line in lines
    ]
    sql = 'SELECT source, task, min("group") FROM episodes WHERE source != ? GROUP BY source, task'
    groups = {(source, task): group for source, task, group in run.store.query(sql, (TRAINING,))}  # numbers of the recorded ones
    by_task: dict[str, list[dict[str, Any]]] = {}
    kinds: dict[str, str] = {}
    for line in lines:
        for task, values in (line.get("by_task") or {}).items():
            kinds[task] = values.get("kind", "")
            source = line.get("source", f"eval-{line['step']}")
            about = {"step": line["step"], "group": groups.get((source, task))}
            by_task.setdefault(task, []).append({**about, **{name: values.get(name) for name in VALUES}})
    tasks: list[dict[str, Any]] = [
        {"task": task, "kind": kinds[task], "values": values, "change": _change(values)} for task, values in by_task.items()
    ]
    tasks.sort(key=lambda row: -_or(row["change"], -float("inf")))
    recorded = run.store.query("SELECT source, count(*) FROM episodes WHERE source != 'train' GROUP BY source")
    differences = ((measured.get("comparison") or {}).get("overall") or {}) if measured else {}
    return {
        "rows": rows,
        "by_task": tasks,
        "episodes": dict(recorded),
        "measured": bool(measured),
        "differences": {name: values.get("difference") for name, values in differences.items()},
    }


def _named(values: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Figures of a model of `agentrl eval` in the form of an evaluation during training."""
    name = Path(str(values.get("path") or "the bundled tiny model")).name
    tasks = {task: {"failures": found.get("failed", 0), "episodes": None, **found} for task, found in (values.get("by_task") or {}).items()}
    return {**values, "label": f"{('baseline', 'model')[number]}: {name}", "source": "eval" if number else None, "by_task": tasks}


VALUES = ("reward", "score", "episodes", "failures")


def _change(values: Sequence[Mapping[str, Any]]) -> float | None:
    known = [value["reward"] for value in values if value["reward"] is not None]
    return known[-1] - known[0] if len(known) > 1 else None
