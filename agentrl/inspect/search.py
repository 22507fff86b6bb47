"""Search in the texts of recorded episodes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.inspect.reader import RunReader
from agentrl.track.index import parsed

AROUND = 60
"""Characters around a match that are shown with it."""
BATCH = 200


def search(run: RunReader, text: str, *, case: bool = False, after: int = 0, limit: int = 50, seconds: float = 0.5) -> dict[str, Any]:
    """Return the first places of a text in prompts, answers, errors and tasks, one for each turn.

    Args:
        run: The run.
        text: What to look for.
        case: Tell small letters from capitals.
        after: Number after which to go on, as ``next`` of the answer before.
        limit: Matches at most; an episode is not divided.
        seconds: Time after which the answer is given in any case.
    """
    until, matches, searched = time.monotonic() + seconds, list[dict[str, Any]](), 0
    total = run.store.one("SELECT count(*) FROM episodes")
    needle = text if case else text.lower()
    raw = json.dumps(needle)[1:-1].encode() if needle.isascii() else b""  # other letters have no form of their own in small ones
    last: int | None = after
    while text and last is not None and len(matches) < limit and time.monotonic() < until:
        rows = run.store.query('SELECT id, start, bytes, "group", step FROM episodes WHERE id > ? ORDER BY id LIMIT ?', (last, BATCH))
        for number, start, size, group, step in rows:
            line = run.store.episode_line(start, size)
            searched, last = searched + 1, number
            # Most lines are ruled out by their bytes, without being parsed.
            if raw in (line if case else line.lower()) and (record := parsed(line)) is not None:
                matches += [{**match, "group": group, "step": step} for match in _matches(record, needle, case=case)]
            if len(matches) >= limit or time.monotonic() > until:
                break
        # A batch that is not full, and was searched to its end, is the last one.
        if len(rows) < BATCH and (not rows or last == rows[-1][0]):
            last = None
    return {"text": text, "matches": matches, "next": last if text else None, "searched": searched, "of": total}


def _matches(record: Mapping[str, Any], needle: str, *, case: bool) -> Iterator[dict[str, Any]]:
    about = {"episode": record.get("episode_id"), "trajectory": record.get("trajectory_id")}
    for turn, where, text in _texts(record):
        at = (text if case else text.lower()).find(needle)
        if at >= 0:
            end = at + len(needle)
            parts = {"before": text[max(0, at - AROUND) : at], "match": text[at:end], "after": text[end : end + AROUND]}
            yield {**about, "turn": turn, "where": where, **parts}


def _texts(record: Mapping[str, Any]) -> Iterator[tuple[int | None, str, str]]:
    task = record.get("task")
    if isinstance(task, Mapping):
        yield None, "task", str(task.get("id", ""))
    for place, turn in enumerate(record.get("turns") or ()):
        number = int(turn.get("number", place))
        yield number, "prompt", str(turn.get("prompt_text", ""))
        yield number, "text", str(turn.get("text", ""))
    if record.get("error"):
        yield None, "error", str(record["error"])
