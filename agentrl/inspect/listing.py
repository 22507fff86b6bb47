"""Lists: the runs of a folder, what there is to know of one run, and its episodes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentrl.config.schema import TrainConfig
from agentrl.core.callbacks import MetricsRow
from agentrl.core.errors import ConfigError
from agentrl.core.paths import near_path
from agentrl.core.types import Status
from agentrl.inspect.directory import CONFIG, METRICS, TRAJECTORIES
from agentrl.inspect.reader import EVAL, RunReader, flags
from agentrl.inspect.samples import num_samples
from agentrl.inspect.store import conditions
from agentrl.resolve.parts import track_plan
from agentrl.track.sinks import ROWS
from agentrl.track.summary import first_and_last
from agentrl.track.tracker import diagnosis_of

SPARKS = 60
FILES = (CONFIG, METRICS, "summary.json", TRAJECTORIES, "groups.jsonl", "steps.jsonl", "annotations.jsonl", "evaluations.jsonl")
MORE_FILES = (ROWS, "launches.jsonl", "requests.jsonl", "eval_trajectories.jsonl", "eval.json")
MAX_DEPTH = 3
MAX_RUNS = 500
SORTS = ("time", "reward", "score", "turns", "tokens", "task", "status", "step")
LEDGER = ("submitted", "trained", "filtered", "dropped", "in_flight")


def is_run(path: Path) -> bool:
    """Return True if a directory holds a run or an evaluation."""
    return any((path / name).is_file() for name in (CONFIG, METRICS, TRAJECTORIES))


def find_runs(folder: Path) -> list[Path]:
    """Return the runs below a folder, or the folder itself if it is one; what runs themselves hold is left out."""
    if is_run(folder):
        return [folder]
    found: list[Path] = []
    waiting = [(folder, 0)]
    while waiting and len(found) < MAX_RUNS:
        place, depth = waiting.pop()
        try:
            children = sorted(Path(entry.path) for entry in os.scandir(place) if entry.is_dir() and not entry.name.startswith("."))
        except OSError:
            continue
        for child in children:
            if is_run(child):
                found.append(child)
            elif depth + 1 < MAX_DEPTH:
                waiting.append((child, depth + 1))
    return sorted(found)


def run_card(run: RunReader, name: str) -> dict[str, Any]:
    """Return what the list of runs shows of one; `name` is its id."""
    settings, summary, launches = run.settings, run.directory.summary(), run.launches
    own, algo, flow = (settings.get(section) or {} for section in ("run", "algo", "flow"))
    rewards = [value for value in run.metrics.column("reward/mean") if value == value]
    first, last = first_and_last(rewards) if rewards else (None, None)
    staleness = (flow.get("max_staleness") or 0) if flow.get("asynchronous") or flow.get("max_staleness") else 0
    if flow.get("asynchronous") and not staleness:
        staleness = 1
    kind = _kind(run)
    if kind == "evaluation":
        first, last = None, _measured_reward(run)
    wall_s = summary.get("wall_s") or next(reversed(run.metrics.column("time_s")), None)
    tags = ("async" if staleness else "sync" if settings else None, algo.get("advantage_estimator"))
    values, best = rewards, max(rewards, default=None)
    if kind == "tune":
        values, tags = [value for value in run.metrics.column("loss") if value == value], (run.tuned_by, _adapter(settings))
        first, last = first_and_last(values) if values else (None, None)
        best = min(values, default=None)
    return {
        "id": name,
        "name": run.path.name,
        "path": str(run.path),
        "kind": kind,
        "command": launches[-1].get("command") if launches else None,
        "agent": near_path(own["agent"]) if own.get("agent") else None,
        "data": (settings.get("data") or {}).get("data") if kind == "tune" else None,
        "model": Path(str((settings.get("model") or {}).get("model") or "the bundled tiny model")).name if settings else None,
        "algorithm": algo.get("advantage_estimator"),
        "staleness": staleness if settings else None,
        "seed": own.get("seed"),
        "status": run.status(launches),
        "stop_reason": summary.get("stop_reason"),
        "step": run.metrics.steps[-1] if run.metrics.rows else 0,
        "num_steps": run.setting("num_steps") or None if kind in ("run", "tune") else None,
        "started_s": launches[0].get("started_s") if launches else None,
        "updated_s": _updated(run.path),
        "wall_s": wall_s if wall_s == wall_s else None,
        "measure": "loss" if kind == "tune" else "reward",
        "reward": {"first": first, "last": last, "best": best},
        "sparkline": _thinned(values),
        "tags": [tag for tag in tags if tag] if kind in ("run", "tune") else [],
        "bytes": sum(size for _, size in _sizes(run.path)),
        "problem": None,
    }


def _adapter(settings: Mapping[str, Any]) -> str:
    """Return the word for the adapter that a run trains; empty for a whole model."""
    return "LoRA" if (settings.get("lora") or {}).get("lora_rank") else ""


def _kind(run: RunReader) -> str:
    if run.tuned_by:
        return "tune"
    if (run.path / METRICS).is_file():
        return "run"
    if (run.path / EVAL).is_file():
        return "evaluation"
    return "run" if run.settings or run.launches else "foreign"


def _measured_reward(run: RunReader) -> float | None:
    found = (run.measured.get("model") or {}).get("overall") or {}
    return (found.get("reward") or {}).get("value")


def _updated(path: Path) -> float:
    return max((entry.stat().st_mtime for entry in (path / name for name in FILES) if entry.exists()), default=0.0)


def _sizes(path: Path) -> list[tuple[str, int]]:
    return [(name, (path / name).stat().st_size) for name in (*FILES, *MORE_FILES) if (path / name).is_file()]


def _thinned(values: list[float]) -> list[float]:
    every = max(1, -(-len(values) // SPARKS))
    return [sum(values[start : start + every]) / len(values[start : start + every]) for start in range(0, len(values), every)]


def run_answer(run: RunReader, name: str, config: type[Any] = TrainConfig) -> dict[str, Any]:
    """Return everything about a run but its lists; `name` is its id, and `config` has the settings of its command."""
    store, last, summary = run.store, run.metrics.last(), run.directory.summed_up()
    changed = run.changed(config)
    known = flags(config)
    return {
        **run_card(run, name),
        "config": run.settings,
        "changed": changed,
        "flags": {full: known[full] for full in changed if full in known},
        "problems": [*run.directory.unreadable, *(f"{file}, byte {start}" for file, start in store.unreadable[:20])],
        "summary": summary,
        "warnings": warnings_of(run),
        "launches": run.launches,
        "ledger": summary.get("ledger") or {name: int(last[f"ledger/{name}"]) for name in LEDGER if f"ledger/{name}" in last},
        "filtered": _counts(last, "filtered/"),
        "dropped": _counts(last, "dropped/"),
        "files": [{"name": file, "bytes": size} for file, size in _sizes(run.path)],
        "steps": run.metrics.rows,
        "episodes": store.one("SELECT count(*) FROM episodes"),
        "recorded": run.setting("record"),
        "account": dict(zip(("episodes", "played"), store.account(), strict=True)),
        "annotations": store.one("SELECT count(DISTINCT trajectory) FROM annotations"),
        "samples": num_samples(run),
        "eval_steps": [line.get("step") for line in run.evaluations],
        "agents": [row[0] for row in store.query("SELECT DISTINCT agent FROM episodes WHERE agent != '' ORDER BY 1")],
        "sources": [row[0] for row in store.query("SELECT source FROM episodes GROUP BY source ORDER BY min(id)")],
        "tasks": store.one("SELECT count(DISTINCT task) FROM groups") or store.one("SELECT count(DISTINCT task) FROM episodes"),
        "index": store.progress,
        "has": {
            "trajectories": store.records.is_file(),
            "annotations": bool(store.one("SELECT 1 FROM annotations LIMIT 1")),
            "groups": bool(store.one("SELECT 1 FROM groups LIMIT 1")),
            "steps": bool(store.one("SELECT 1 FROM steps LIMIT 1")),
            "evaluations": (run.path / "evaluations.jsonl").is_file(),
            "requests": (run.path / "requests.jsonl").is_file(),
            "tokenizer": run.texts.available,
        },
    }


def warnings_of(run: RunReader) -> list[dict[str, Any]]:
    """Return the warnings that a run cannot learn; of one that has not ended, those that its metrics show by the rules of the run."""
    if written := run.directory.summary().get("warnings"):
        return list(written)
    if run.config is None:
        return []
    diagnosis = diagnosis_of(track_plan(run.config))
    for step in run.metrics.steps:
        metrics = run.metrics.row(step)
        if "reward/mean" in metrics:
            diagnosis.on_metrics(MetricsRow(step=step, metrics=metrics))
    return [asdict(warning) for warning in diagnosis.warnings]


def _counts(metrics: Mapping[str, float], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): int(value) for name, value in metrics.items() if name.startswith(prefix)}


def changes_answer(run: RunReader) -> dict[str, Any]:
    """Return sizes that tell if there is anything new; the version is another if there is."""
    store = run.store
    # SQLite finds the largest rowid without reading the table, which it would have to do to count rows.
    counts = {table: store.one(f"SELECT max(rowid) FROM {table}") or 0 for table in ("episodes", "groups", "annotations")}
    status, progress = run.status(), store.progress
    version = "-".join(str(value) for value in (run.metrics.rows, *counts.values(), status, progress["done"]))
    return {"version": version, "steps": run.metrics.rows, **counts, "status": status, "bytes": progress["bytes"], "index": progress}


COLUMNS = {
    "episode": "episode",
    "trajectory": "name",
    "attempt": "attempt",
    "agent": "agent",
    "group": '"group"',
    "version": "step - 1",
    "step": 'coalesce((SELECT m.step FROM members m WHERE m."group" = episodes."group" AND m.spare = 0 AND source = \'train\'), step)',
    "task": "task",
    "source": "source",
    "status": "status",
    "reward": "reward",
    "score": "score",
    "turns": "turns",
    "tokens": "tokens",
    "ended_s": "ended_s",
    "seconds": "seconds",
    "prompt": "prompt",
    "label": "label",
    "label_type": "label_type",
    "last": "text",
    "error": "error",
    "verdict": 'CASE source WHEN \'train\' THEN (SELECT g.verdict FROM groups g WHERE g."group" = episodes."group" '
    "AND g.attempt = episodes.attempt ORDER BY g.id DESC LIMIT 1) END",
    "annotated": "EXISTS (SELECT 1 FROM annotations a WHERE a.trajectory = episodes.name)",
}
"""Column of the list of episodes -> SQL."""


def episode_list(run: RunReader, chosen: Mapping[str, Any], *, sort: str = "-time", offset: int = 0, limit: int = 50) -> dict[str, Any]:
    """Return a page of the recorded trajectories.

    Args:
        run: The run.
        chosen: Conditions that a row must meet: ``step``, ``group``, ``task`` (a part of its id), ``status`` (one or several with commas),
            ``agent``, ``source``, ``min_reward``, ``max_reward``, ``text`` (a part of task, prompt, label, episode, error or last text).
        sort: One of `SORTS`, with a minus descending.
        offset: Rows to leave out at the beginning.
        limit: Rows at most.

    Raises:
        ConfigError: If there is no such order.
    """
    by = sort.lstrip("-")
    if by not in SORTS:
        raise ConfigError("sort", sort, "is no order", f"Choose {', '.join(SORTS)}, with a minus before it for descending.")
    where, values = conditions(chosen)
    if chosen.get("step") is not None:
        where, values = f"{where} AND {COLUMNS['step']} = ?", [*values, chosen["step"]]
    order = "id" if by == "time" else f"{by} {'DESC' if sort.startswith('-') else 'ASC'}, id"
    direction = " DESC" if by == "time" and sort.startswith("-") else ""
    columns = ", ".join(f'{sql} AS "_{name}"' for name, sql in COLUMNS.items())
    sql = f"SELECT {columns} FROM episodes WHERE {where} ORDER BY {order}{direction} LIMIT ? OFFSET ?"
    rows = run.store.query(sql, (*values, limit, offset))
    statuses = dict(run.store.query("SELECT status, count(*) FROM episodes GROUP BY status ORDER BY 2 DESC"))
    return {
        "of": run.store.one("SELECT count(*) FROM episodes"),
        "chosen": run.store.one(f"SELECT count(*) FROM episodes WHERE {where}", values),
        "offset": offset,
        "rows": [{**dict(zip(COLUMNS, row, strict=True)), "annotated": bool(row[-1])} for row in rows],
        "statuses": statuses,
        "failed": sum(count for status, count in statuses.items() if status in {str(item) for item in Status if item.failed}),
        "index": run.store.progress,
    }


def unreadable_card(path: Path, name: str, problem: str) -> dict[str, Any]:
    """Return the card of a run that cannot be opened."""
    return {
        "id": name,
        "name": path.name,
        "path": str(path),
        "kind": "run",
        "status": "unknown",
        "problem": problem,
        "sparkline": [],
        "tags": [],
    }


def in_order(cards: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return cards with the run that was written to last first."""
    return sorted(cards, key=lambda card: -(card.get("updated_s") or 0.0))
