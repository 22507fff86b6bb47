"""Everything that is recorded of one episode, of one group, and of the tokens that explain a figure of a step."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from agentrl.core.annotations import Annotation, read_annotation
from agentrl.core.differences import Tokens, first_difference
from agentrl.core.errors import ConfigError
from agentrl.core.paths import near_path
from agentrl.core.types import FinishReason, Status
from agentrl.inspect.groups import GroupFacts, find_group
from agentrl.inspect.reader import RunReader
from agentrl.inspect.store import Store
from agentrl.inspect.tokens import FIELDS, MASK_TEXTS, Part, every_value, masks, ranges, turn_views
from agentrl.rollout.records import started_s
from agentrl.track.index import TRAINING, type_name

Record: TypeAlias = Mapping[str, Any]

TRAINABLE = (Status.FINISHED, Status.TRUNCATED)
NEAR = 6
"""Tokens around one that are shown with it."""


def find_records(run: RunReader, episode: str, attempt: int | None = None) -> list[dict[str, Any]]:
    """Return the records of an episode, one per agent; of its last attempt, or of the one that is asked for.

    Raises:
        ConfigError: If it is not recorded.
    """
    sql = "SELECT attempt, start, bytes FROM episodes WHERE episode = ? ORDER BY attempt, id"
    rows = run.store.query(sql, (episode,)) or run.store.query(sql.replace("episode =", "name ="), (episode,))
    attempts = [row[0] for row in rows]
    wanted = attempts[-1] if attempts and attempt is None else attempt
    lines = run.store.lines("episodes", [(row[1], row[2]) for row in rows if row[0] == wanted])
    by_name = {record.get("trajectory_id"): record for record in lines}  # the last of each, should there be two
    if not by_name:
        remedy = "A large run records one episode of most groups; a larger --record, or --record all, records more."
        raise ConfigError("EPISODE", episode, "is not among the recorded episodes", remedy)
    return list(by_name.values())


@dataclass(frozen=True, slots=True)
class Shown:
    """An image of an episode: a path or a data URL, the place of the trajectory whose agent reads it, and the number of its turn.

    The latter are `None` for images of the task.
    """

    source: Any
    trajectory: int | None = None
    number: int | None = None


def images_of(records: Sequence[Record]) -> list[Shown]:
    """Return the images of an episode: those of its task, then those of the observations of each agent."""
    task = records[0].get("task")
    images = task.get("images") if isinstance(task, Mapping) else None
    shown = [Shown(image) for image in (images if isinstance(images, list) else ())]
    for place, record in enumerate(records):
        rows = record.get("images")
        pairs = [row for row in (rows if isinstance(rows, list) else ()) if isinstance(row, list) and len(row) == 2]
        shown += [Shown(image, place, number) for number, image in pairs]
    return shown


def forks_of(store: Store, record: Record) -> list[dict[str, Any]]:
    """Return the recorded episodes that go on from a turn of an episode: their names, and the turns that they share with it."""
    where = '"group" = ? AND source = ? AND attempt = ? AND forked_from = ?'
    sql = f"SELECT DISTINCT episode, forked_turns FROM episodes WHERE {where} ORDER BY id"
    names = (record.get("group_id", -1), source_of(record), record.get("attempt", 0), record.get("episode_id"))
    return [{"episode": episode, "turns": turns} for episode, turns in store.query(sql, names)]


def annotation_of(run: RunReader, trajectory: str) -> Annotation | None:
    """Return what the learner wrote last about a trajectory; `None` if it wrote nothing."""
    rows = run.store.query(
        "SELECT start, bytes FROM annotations WHERE trajectory = ? ORDER BY step DESC, start DESC LIMIT 1", (trajectory,)
    )
    lines = run.store.lines("annotations", rows) if rows else []
    return read_annotation(lines[0]) if lines else None


def parts_of(run: RunReader, records: Sequence[Record]) -> list[Part]:
    """Return the trajectories of an episode with their annotations and, where there are none, why they were not trained."""
    group, parts = group_of(run, records[0]), []
    for record in records:
        annotation = None
        # Annotations do not name an attempt, and the last one is the one that is trained on.
        if source_of(record) == TRAINING and int(record.get("attempt", 0)) == (group.attempt or 0):
            annotation = annotation_of(run, str(record.get("trajectory_id")))
        step = annotation.step if annotation is not None else group.step
        parts.append(Part(record=record, annotation=annotation, mask=why_not_trained(run, record, group), step=step))
    return parts


def group_of(run: RunReader, record: Record) -> GroupFacts:
    """Return what is known of the group of a record."""
    return find_group(run, int(record.get("group_id", -1)), source=source_of(record))


def source_of(record: Record) -> str:
    """Return `TRAINING`, or the name of the evaluation in which the episode was played."""
    return str((record.get("eval_sampling") or {}).get("name", TRAINING))


def why_not_trained(run: RunReader, record: Record, group: GroupFacts) -> str:
    """Return what became of the tokens of a trajectory, as far as it can be told without the learner: a key of `MASK_TEXTS`."""
    if source_of(record) != TRAINING:
        return "evaluation"
    if record.get("status") not in TRAINABLE:
        return "failed"
    if record.get("frozen"):
        return "frozen"
    if group.attempt is not None and int(record.get("attempt", 0)) < group.attempt:
        return "retried"
    if group.verdict in ("filtered", "dropped", "retried", "spare"):
        return str(group.verdict)
    turns = record.get("turns") or [{}]
    cut = record.get("status") == Status.TRUNCATED or turns[-1].get("finish_reason") == FinishReason.LENGTH
    if cut and run.setting("mask_truncated"):
        return "cut_short"
    if group.step is not None:
        return "trained"
    return "pending" if group.verdict == "kept" else "unknown"


def episode_answer(run: RunReader, episode: str, attempt: int | None = None) -> dict[str, Any]:
    """Return an episode with every token.

    Raises:
        ConfigError: If it is not recorded.
    """
    records = find_records(run, episode, attempt)
    first, parts = records[0], parts_of(run, records)
    views, branches = turn_views(parts, run.texts)
    images = images_of(records)
    own = [index for index, image in enumerate(images) if image.number is None]
    for view in views:
        place = (view["trajectory"], view["number"])
        view["images"] = [index for index, image in enumerate(images) if (image.trajectory, image.number) == place]
        view["pictures"] = _pictures(view["pictures"], own, view["images"])
    shown = {index for view in views for index in view["images"]}
    name, group, values = str(first.get("episode_id", episode)), group_of(run, first), ranges(views)
    before, after = _neighbours(run, name)
    return {
        "episode": name,
        "group": first.get("group_id"),
        "attempt": first.get("attempt", 0),
        "attempts": [row[0] for row in run.store.query("SELECT DISTINCT attempt FROM episodes WHERE episode = ? ORDER BY 1", (name,))],
        "task": task_answer(first),
        "version": first.get("version"),
        "step": parts[0].step,
        "verdict": group.verdict,
        "verdict_reason": group.reason,
        "source": source_of(first),
        "status": first.get("status", "cut"),
        "error": first.get("error"),
        "clipped": bool(first.get("clipped")),
        "previous": before,
        "next": after,
        "metrics": first.get("metrics") or {},
        "timings": first.get("timings") or {},
        "started_s": started_s(first),
        "ended_s": first.get("ended_s"),
        "images": len(images),
        "unread_images": [index for index, image in enumerate(images) if image.number is not None and index not in shown],
        "trajectories": [_trajectory(part) for part in parts],
        "forked_from": first.get("forked_from") or None,
        "forked_turns": first.get("forked_turns", 0),
        "forks": forks_of(run.store, first),
        "branches": branches,
        "turns": views,
        "spans": [dict(zip(("name", "turn", "start_s", "seconds"), span, strict=False)) for span in first.get("spans") or ()],
        "fields": [name for name in (*FIELDS, "version", "staleness") if name in values],
        "ranges": values,
        "masks": masks(views),
        "commands": _commands(run, name, str((first.get("task") or {}).get("id", ""))),
        "has_tokenizer": run.texts.tokenizer is not None,
        "record_url": f"record/{name}",
    }


def _about(part: Part) -> dict[str, Any]:
    """Facts about a trajectory that the pages of its episode and of its group show."""
    record = part.record
    return {
        "agent": record.get("agent", ""),
        "reward": record.get("reward"),
        "reward_parts": record.get("reward_parts") or {},
        "score": record.get("score"),
        "forked_from": record.get("forked_from") or None,
        "forked_turns": record.get("forked_turns", 0),
        "mask": "trained" if part.annotation is not None else part.mask,
    }


def _trajectory(part: Part) -> dict[str, Any]:
    about = _about(part)
    return {
        **about,
        "id": part.record.get("trajectory_id"),
        "frozen": bool(part.record.get("frozen")),
        "annotated": part.annotation is not None,
        "trained_step": part.step,
        "mask_text": MASK_TEXTS[about["mask"]],
    }


def _pictures(blocks: Sequence[Any], of_task: list[int], of_turn: list[int]) -> list[dict[str, Any]]:
    """Return the numbers of the images that a turn's prompt has, with the blocks of their tokens; none if they cannot be told."""
    numbers = next((each for each in (of_turn, [*of_task, *of_turn]) if len(each) == len(blocks)), [])
    return [{"image": number, "blocks": each} for number, each in zip(numbers, blocks, strict=False)]


def task_answer(record: Record) -> dict[str, Any]:
    """Return the task of a record; a label that JSON does not know in the form of Python."""
    task = record.get("task") if isinstance(record.get("task"), Mapping) else {}
    assert isinstance(task, Mapping)
    literals = task.get("literals") or {}
    values = {name: literals.get(name, task.get(name)) for name in ("prompt", "label", "metadata")}
    own = {name: task.get(name) for name in ("id", "epoch", "position", "seed")}
    return {**own, **values, "label_type": type_name(task, "label"), "images": len(task.get("images") or ())}


def _neighbours(run: RunReader, episode: str) -> tuple[str | None, str | None]:
    first, last = run.store.query("SELECT min(id), max(id) FROM episodes WHERE episode = ?", (episode,))[0]
    before = run.store.one("SELECT episode FROM episodes WHERE id < ? ORDER BY id DESC LIMIT 1", (first,))
    return before, run.store.one("SELECT episode FROM episodes WHERE id > ? AND episode != ? ORDER BY id LIMIT 1", (last, episode))


def _commands(run: RunReader, episode: str, task: str) -> dict[str, str]:
    """Command lines about an episode; none for a file of another system."""
    path, agent = str(run.path), near_path(str(run.setting("agent") or ""))
    if not agent:
        return {}
    words = {"inspect": [path, episode], "replay": [path, episode]}
    if ":" not in agent[:2]:
        words["play"] = [agent, "--task", task]
    return {command: shlex.join(["agentrl", command, *rest]) for command, rest in words.items()}


def record_answer(run: RunReader, episode: str, attempt: int | None = None) -> dict[str, Any]:
    """Return the lines of an episode as they stand in the files."""
    records = find_records(run, episode, attempt)
    places = [
        row
        for record in records
        for row in run.store.query("SELECT start, bytes FROM annotations WHERE trajectory = ?", (record.get("trajectory_id"),))
    ]
    return {"records": records, "annotations": run.store.lines("annotations", places)}


def group_answer(run: RunReader, group: int, attempt: int | None = None, source: str = TRAINING) -> dict[str, Any]:
    """Return a group with its members side by side.

    Raises:
        ConfigError: If nothing of it is recorded.
    """
    facts = find_group(run, group, attempt, source)
    sql = 'SELECT DISTINCT episode FROM episodes WHERE "group" = ? AND source = ? AND attempt = ? ORDER BY id'
    names = [row[0] for row in run.store.query(sql, (group, source, facts.attempt or 0))]
    if not names and facts.line is None:
        raise ConfigError("GROUP", str(group), "is not recorded", "Its number is the first part of the names of its episodes.")
    members: list[dict[str, Any]] = []
    task: dict[str, Any] = {}
    for name in names:
        records = find_records(run, name, facts.attempt)
        task = task or task_answer(records[0])
        parts = parts_of(run, records)
        views, _ = turn_views(parts, run.texts)
        members += [_member(part, [view for view in views if view["trajectory"] == number]) for number, part in enumerate(parts)]
    members += _not_recorded(facts, {member["trajectory"] for member in members})
    recorded = [member for member in members if member["recorded"]]
    # Members are compared token by token, and the number of pairs grows with their square.
    pairs = [[differs_at(a["turns"], b["turns"]) for b in recorded] for a in recorded] if len(recorded) <= 16 else None
    places = [place for row in pairs or () for place in row if place is not None]
    first = min(places, key=lambda place: (place["turn"], place["token"]), default=None)
    return {**facts.row(), "group": group, "task_info": task, "members": members, "first_difference": first, "pairs": pairs}


def _member(part: Part, views: list[dict[str, Any]]) -> dict[str, Any]:
    record = part.record
    advantages = [value for view in views for value in every_value(view["tokens"]["advantage"], 1) if value is not None]
    return {
        **_about(part),
        "episode": record.get("episode_id"),
        "trajectory": record.get("trajectory_id"),
        "status": record.get("status"),
        "error": record.get("error"),
        "recorded": True,
        "advantage": sum(advantages) / len(advantages) if advantages else None,
        "turns": views,
    }


def _not_recorded(facts: GroupFacts, known: set[Any]) -> list[dict[str, Any]]:
    line = facts.line or {}
    names, agents = line.get("episodes") or (), line.get("agents") or itertools.repeat("")
    columns = zip(names, agents, line.get("statuses") or (), line.get("rewards") or (), line.get("scores") or (), strict=False)
    rows = []
    for episode, agent, status, reward, score in columns:
        trajectory = f"{episode}-{agent}" if agent else episode
        if trajectory not in known:
            row = {"episode": episode, "trajectory": trajectory, "agent": agent, "status": status, "reward": reward, "score": score}
            empty = {"error": None, "recorded": False, "advantage": None, "mask": "unknown", "forked_from": None, "forked_turns": 0}
            rows.append({**row, **empty, "reward_parts": {}, "turns": []})
    return rows


def differs_at(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> dict[str, int] | None:
    """Return the first turn of two members, and its first sampled token, that differ; `None` if there is none."""
    played = [
        # Texts count only where there are no token ids, as in files of other systems.
        [{"tokens": Tokens(tuple(ids := turn["tokens"]["ids"])), "text": "" if ids else turn["text"]} for turn in turns]
        for turns in (one, other)
    ]
    difference = first_difference(*played)
    return None if difference is None else {"turn": difference.turn, "token": difference.token}
