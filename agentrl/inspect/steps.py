"""One step: the groups it trained on, those that ended beside it, and who did what when."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.env.timing import TOOL
from agentrl.inspect.groups import GroupFacts, find_groups
from agentrl.inspect.reader import RunReader
from agentrl.inspect.series import TOKENS_BY_METRIC

LANES = ("learner", "train loop", "publication", "evaluation", "groups", "engine", "environment", "tools")
MAX_SPANS = 5000
MAX_BESIDE = 500
"""Groups of other steps that are shown beside those of a step."""
MAX_BESIDE_BYTES = 4_000_000
"""Bytes of their records that are read for that."""
BEFORE = 2.0
"""Lengths of a step, from its beginning on, that its lanes go back to show how its groups were made."""
WHOLE = ("time/step_s", "time/train_s", "time/learner_s")
"""Times that are no part of the learner's work, but the whole of something."""


def step_answer(run: RunReader, step: int) -> dict[str, Any]:
    """Return everything about a step, from 1; step 0 is an evaluation before the first.

    Raises:
        ConfigError: If nothing is known of it.
    """
    metrics, line = run.metrics.row(step), _line(run, step)
    groups, others, exact = _exact(run, step, line) if line is not None else _recorded(run, step)
    if not metrics and not groups:
        raise ConfigError("STEP", step, "is not recorded", f"The run has {run.metrics.rows} steps.")
    rows = [group.row() for group in groups]
    return {
        "step": step,
        "of": run.setting("num_steps"),
        "metrics": metrics,
        "previous": run.metrics.row(step - 1),
        "groups": rows,
        "others": [group.row() for group in others],
        "rewards": [reward for row in rows for reward in row["rewards"] if reward is not None],
        "exact": exact,
        "lanes": _lanes(run, line, [*groups, *others], step),
        "phases": _phases(metrics),
        "tokens_by": {name: by for name, by in TOKENS_BY_METRIC.items() if name in metrics},
        "notes": list(_notes(rows, metrics, exact=exact)),
    }


def _line(run: RunReader, step: int) -> dict[str, Any] | None:
    places = run.store.query("SELECT start, bytes FROM steps WHERE step = ?", (step,))
    return next(iter(run.store.lines("steps", places)), None)


def _exact(run: RunReader, step: int, line: Mapping[str, Any]) -> tuple[list[GroupFacts], list[GroupFacts], bool]:
    """The groups that the step says it trained on, and those judged between its beginning and its end that it did not."""
    trained = [int(group) for group in line.get("groups", ())]
    begin, end = line.get("begin_s"), line.get("trained_s")
    sql = "SELECT \"group\", attempt FROM groups WHERE ended_s > ? AND ended_s <= ? AND verdict != 'kept' ORDER BY id"
    found = run.store.query(sql, (begin, end)) if begin is not None else []
    others: list[GroupFacts] = [facts for group, attempt in found for facts in find_groups(run, [group], {group: attempt})]
    spare = find_groups(run, [int(group) for group in line.get("spare", ())])
    return find_groups(run, trained), [*others, *spare], True


def _recorded(run: RunReader, step: int) -> tuple[list[GroupFacts], list[GroupFacts], bool]:
    """The recorded groups that were started when the step was next, in a run of an older version."""
    sql = "SELECT DISTINCT \"group\" FROM episodes WHERE step = ? AND source = 'train' ORDER BY 1"
    groups = find_groups(run, [row[0] for row in run.store.query(sql, (step,))])
    trained = [group for group in groups if group.verdict in (None, "kept")]
    return trained, [group for group in groups if group.verdict not in (None, "kept")], False


def _lanes(run: RunReader, line: Mapping[str, Any] | None, groups: Sequence[GroupFacts], step: int) -> dict[str, Any]:
    """Times since 1970: from the beginning of the step's groups to the moment at which the weights were live everywhere.

    In an asynchronous run the groups were begun before the step; groups of other steps that were played in this time are shown too.
    """
    spans = [*_loop_spans(line, step)] if line is not None else []
    rows = [group.row() for group in groups]
    starts = [row["started_s"] for row in rows if row["started_s"] is not None]
    beside: list[GroupFacts] = []
    begin = since = line.get("begin_s") if line else min(starts, default=None)
    end = line.get("live_s") if line else max((row["ended_s"] for row in rows if row["ended_s"] is not None), default=None)
    if begin is not None and end is not None:
        begin = max(begin - BEFORE * (end - begin), min([begin, *starts]))
        spans += _neighbour_spans(run, begin, end, step)
        beside = _beside(run, begin, end, {group.group for group in groups})
        spans += _episode_spans(run, beside, most_bytes=MAX_BESIDE_BYTES)
    spans += _episode_spans(run, groups)
    for row in (group.row() for group in [*groups, *beside]):
        if row["started_s"] is not None:
            about = {"group": row["group"], "worker": row["worker"], "verdict": row["verdict"], "step": row["step"]}
            spans.append(_span("groups", f"group {row['group']}", row["started_s"], row["ended_s"]) | about)
    spans.sort(key=lambda span: (LANES.index(span["lane"]), span["start_s"]))
    cut = len(spans) > MAX_SPANS
    return {"begin_s": begin, "step_begin_s": since, "end_s": end, "order": LANES, "spans": spans[:MAX_SPANS], "cut": cut}


def _beside(run: RunReader, begin: float, end: float, known: Set[int]) -> list[GroupFacts]:
    """The other groups that were under way in a time, at most `MAX_BESIDE`."""
    sql = 'SELECT "group", attempt FROM groups WHERE ended_s > ? AND ended_s - seconds < ? ORDER BY id LIMIT ?'
    # Groups of the step itself may be among those found, and are taken out below.
    found = run.store.query(sql, (begin, end, MAX_BESIDE + len(known)))
    attempts = {group: attempt for group, attempt in found if group not in known}
    return find_groups(run, list(attempts), attempts) if attempts else []


def _loop_spans(line: Mapping[str, Any], step: int) -> Iterator[dict[str, Any]]:
    parts = (
        ("train loop", "wait for groups", "begin_s", "taken_s"),
        ("learner", "train", "taken_s", "trained_s"),
        ("train loop", "wait for the publication before", "trained_s", "exporting_s"),
        ("learner", "export", "exporting_s", "exported_s"),
        ("publication", "publish", "publishing_s", "live_s"),
    )
    for lane, name, begin, end in parts:
        if line.get(begin) is not None and line.get(end) is not None:
            yield _span(lane, name, line[begin], line[end]) | {"step": step}
    if line.get("evaluation_s"):
        yield _span("evaluation", "evaluate", *line["evaluation_s"]) | {"step": step}


def _span(lane: str, name: str, start_s: float, end_s: float) -> dict[str, Any]:
    about = dict.fromkeys(("step", "group", "episode", "worker", "turn"))
    return {"lane": lane, "name": name, "start_s": start_s, "end_s": end_s, **about}


def _neighbour_spans(run: RunReader, begin: float, end: float, step: int) -> Iterator[dict[str, Any]]:
    """Spans of other steps in the time of this one: the publication of the one before, the training of the one after."""
    sql = "SELECT step, start, bytes FROM steps WHERE step != ? AND live_s > ? AND begin_s < ?"
    for other, start, size in run.store.query(sql, (step, begin, end)):
        for line in run.store.lines("steps", [(start, size)]):
            yield from (span for span in _loop_spans(line, other) if span["end_s"] > begin and span["start_s"] < end)


def _episode_spans(run: RunReader, groups: Sequence[GroupFacts], most_bytes: float = math.inf) -> Iterator[dict[str, Any]]:
    """Waits of the recorded episodes, as far as their records are not too large to be read; an episode is taken to begin with its group."""
    count = read = 0
    for group in groups:
        names = [row[0] for row in group.episodes]
        if not names or count > MAX_SPANS or read > most_bytes:
            continue
        marks = ", ".join("?" * len(names))
        places = run.store.query(f"SELECT start, bytes FROM episodes WHERE name IN ({marks}) AND attempt = ?", (*names, group.attempt))
        read += sum(size for _, size in places)
        for record in run.store.lines("episodes", places):
            if record.get("ended_s") is None or record.get("group_s") is None:
                continue
            origin = record["ended_s"] - record["group_s"]
            for name, turn, start_s, seconds in record.get("spans") or ():
                lane = "engine" if name == "generate" else "tools" if name.startswith(TOOL) else "environment"
                count += 1
                about = {"group": group.group, "episode": record.get("episode_id"), "turn": turn, "step": group.step}
                yield _span(lane, name, origin + start_s, origin + start_s + seconds) | about


def _phases(metrics: Mapping[str, float]) -> list[dict[str, Any]]:
    names = [name for name in metrics if name.startswith("time/") and name.endswith("_s") and name not in WHOLE]
    return [{"name": name.removeprefix("time/").removesuffix("_s"), "seconds": metrics[name]} for name in names]


def _notes(rows: Sequence[Mapping[str, Any]], metrics: Mapping[str, float], *, exact: bool) -> Iterator[str]:
    """Sentences on what keeps a step from teaching anything."""
    if rows and all(row["flat"] for row in rows):
        level = rows[0]["reward_mean"]
        same = all(row["reward_mean"] == level for row in rows)
        yield f"Every member of every group has {f'the reward {level:g}' if same else 'the reward of its group'}: nothing to compare."
    if metrics.get("grad_norm") == 0.0:
        yield "The gradient was exactly 0, so this step changed nothing."
    if (masked := metrics.get("off_policy/masked", 0.0)) > 0.5:
        yield f"The off-policy correction removed {100 * masked:.3g}% of the tokens."
    if (truncated := metrics.get("episode/truncated", 0.0)) >= 0.95:
        yield f"{100 * truncated:.3g}% of the episodes were cut short by a budget."
    if metrics.get("skipped_updates"):
        yield f"{metrics['skipped_updates']:g} updates were skipped, because their gradient was not finite."
    if not exact:
        yield "This run does not say which groups a step trained on: those recorded that began with its weights are shown."
