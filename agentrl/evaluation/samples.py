"""Rows of a data set from sampled episodes: the best, pairs, or all; and the journal from which they are made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.core.files import complete_file
from agentrl.core.types import Status, Task
from agentrl.evaluation.plan import SelectConfig
from agentrl.track.jsonl import JsonLines, encode, read_lines

Row = dict[str, Any]

FAILED = "every episode failed"
"""Reason for which a task has no row."""


def task_entry(task: Task, records: Sequence[Mapping[str, Any]]) -> Row:
    """Return the entry of a task in the journal: its episodes with their rewards, and the errors of those that failed."""
    ended = [record for record in records if Status(record["status"]).trainable and not record["frozen"] and record["turns"]]
    return {
        "position": task.position,
        "task_id": task.id,
        "prompt": task.prompt,
        "label": task.label,
        "episodes": [_episode(record) for record in ended],
        "failures": [f"{record['status']}: {record['error']}" for record in records if Status(record["status"]).failed],
    }


def _episode(record: Mapping[str, Any]) -> Row:
    turns = record["turns"]
    messages = list(record.get("messages") or ())
    while messages and messages[-1]["role"] != "assistant":  # what the policy did not answer any more
        messages.pop()
    first, *others = turns
    text = first["text"] + "".join(turn["prompt_text"] + turn["text"] for turn in others)
    return {
        "episode_id": record["episode_id"],
        "agent": record["agent"],
        "reward": record["reward"],
        "score": record["score"],
        "reward_parts": record["reward_parts"],
        "model_scores": record.get("model_scores", {}),
        "num_turns": len(turns),
        "num_tokens": sum(len(turn["token_ids"]) for turn in turns),
        "messages": messages,
        "rendered": [] if messages else [first["prompt_text"], text],
    }


@dataclass(slots=True)
class Selection:
    """Rows of the data set, and why tasks have none."""

    rows: list[Row] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)  # reason -> tasks

    def leave_out(self, reason: str) -> None:
        """Count a task without a row."""
        self.left_out[reason] = self.left_out.get(reason, 0) + 1


def select(entries: Iterable[Mapping[str, Any]], settings: SelectConfig) -> Selection:
    """Return the rows that ``--select`` asks for, by task; of equal rewards the episode sampled first is the better one."""
    entries = sorted(entries, key=lambda entry: int(entry["position"]))
    # One form for all rows, because the rows of a data set have the same columns.
    as_messages = all(episode["messages"] for entry in entries for episode in entry["episodes"])
    selection = Selection()
    for entry in entries:
        answered = [episode for episode in entry["episodes"] if _last_text(episode).strip()]
        ranked = sorted(answered, key=lambda episode: -episode["reward"])  # a stable sort
        if not ranked:
            selection.leave_out("every answer is empty" if entry["episodes"] else FAILED)
        elif settings.select == "pairs":
            _add_pairs(selection, entry, ranked, settings)
        else:
            chosen = ranked[: settings.keep] if settings.select == "best" else answered
            chosen = [episode for episode in chosen if settings.min_reward is None or episode["reward"] >= settings.min_reward]
            selection.rows += [_answer(entry, episode, as_messages) for episode in chosen]
            if not chosen:
                selection.leave_out("no reward reaches --min-reward")
    return selection


def _answer(entry: Mapping[str, Any], episode: Mapping[str, Any], as_messages: bool) -> Row:
    """One episode as a row for supervised training: messages, or the rendered text where some environment spoke in raw text."""
    given = {"messages": episode["messages"]} if as_messages else {"text": _text(episode)}
    return {**given, "task_id": entry["task_id"], **_scores(episode)}


def _add_pairs(selection: Selection, entry: Mapping[str, Any], ranked: Sequence[Mapping[str, Any]], settings: SelectConfig) -> None:
    """Add the pair of best and worst, then of second best and second worst, as long as they differ; no two texts twice."""
    seen: set[tuple[Any, Any]] = set()
    reason = "rewards do not differ enough"
    # Half of them at most, so that no episode is chosen in one pair and rejected in another.
    for best, worst in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
        better, other = _prompt_and_answer(best), _prompt_and_answer(worst)
        if len(seen) == settings.keep or not best["reward"] - worst["reward"] > settings.min_margin:
            break
        if better is None or other is None or better[0] != other[0]:
            reason = "episodes of several turns make no pairs"
            continue
        (prompt, chosen), (_, rejected) = better, other
        if (chosen, rejected) not in seen:
            seen.add((chosen, rejected))
            margin = {"reward_margin": best["reward"] - worst["reward"]}
            scores = {
                f"{side}_{key}": value for side, own in (("chosen", best), ("rejected", worst)) for key, value in _scores(own).items()
            }
            row = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "task_id": entry["task_id"], **margin, **scores}
            selection.rows.append(row)
    if not seen:
        selection.leave_out(reason)


def _prompt_and_answer(episode: Mapping[str, Any]) -> tuple[Any, str] | None:
    """The prompt and the only answer of an episode; `None` for one with several turns."""
    if episode["num_turns"] != 1:
        return None
    if episode["messages"]:
        return episode["messages"][:-1], episode["messages"][-1]["content"]
    prompt, text = episode["rendered"]
    return prompt, text


def _last_text(episode: Mapping[str, Any]) -> str:
    return str(episode["messages"][-1]["content"] if episode["messages"] else episode["rendered"][1])


def _scores(episode: Mapping[str, Any]) -> Row:
    found = {"reward": episode["reward"], "score": episode["score"]}
    return found | ({"model_scores": episode["model_scores"]} if episode["model_scores"] else {})


def _text(episode: Mapping[str, Any]) -> str:
    if episode["rendered"]:
        return "".join(episode["rendered"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in episode["messages"])


class Journal:
    """The file with an entry per task that is done, one line each, written whole as soon as the task is done.

    A line that a crash cut short is dropped when the file is opened again; its task is sampled again, with the same seeds.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries: dict[int, Row] = {}  # by position of the task
        if path.exists():
            self._recover()
        self._lines = JsonLines(path)

    def add(self, entry: Row) -> None:
        """Write an entry; the task must have none yet."""
        if entry["position"] in self.entries:
            raise ValueError(f"task {entry['task_id']!r} is in the journal already")
        line = encode(entry)
        self._lines.write(line)
        # As it will be read from the file, so that a command that goes on later makes the same rows of it.
        self.entries[entry["position"]] = json.loads(line)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def _recover(self) -> None:
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            with complete_file(self._path) as partial:
                partial.write_bytes(whole)
        self.entries = {int(entry["position"]): entry for entry in read_lines(self._path)}


def check_tasks(entries: Mapping[int, Mapping[str, Any]], tasks: Sequence[Task]) -> None:
    """Make sure that the tasks of a journal are still those of the environment.

    Raises:
        ConfigError: If one is another now.
    """
    by_position = {task.position: task for task in tasks}
    for position, entry in entries.items():
        task = by_position.get(position)
        if task is None or task.id != entry["task_id"]:
            problem = f"task {entry['task_id']!r} at place {position} is {'gone' if task is None else f'{task.id!r} now'}"
            raise ConfigError("--resume", True, problem, "Restore the tasks, or begin another data set in another --output.")
