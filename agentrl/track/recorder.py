"""Sample trajectories as JSON lines, for people and for the viewer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentrl.core.summaries import GroupSummary
from agentrl.track.jsonl import JsonLines, encode

MAX_LINE_BYTES = 1_000_000


class TrajectoryRecorder:
    """Appends the records that come with finished groups.

    Args:
        path: File to append to.
        max_line_bytes: A longer record has its texts and lists shortened until it fits.
        clock: Seconds since an arbitrary moment.
    """

    def __init__(self, path: Path, *, max_line_bytes: int = MAX_LINE_BYTES, clock: Callable[[], float] = time.time) -> None:
        self._lines, self._max, self._clock = JsonLines(path), max_line_bytes, clock

    def on_group(self, summary: GroupSummary) -> None:
        """Write every record of one group, with the time at which the group ended and how long it took."""
        when = {"ended_s": round(self._clock(), 4), "group_s": round(summary.seconds, 4)}
        for record in summary.records:
            self._lines.write(encode_capped({**record, **when}, self._max))

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._lines.close()


def encode_capped(record: Mapping[str, Any], max_bytes: int) -> str:
    """Encode `record` in at most `max_bytes` bytes.

    Args:
        record: A JSON-ready mapping.
        max_bytes: Longest line allowed, newline excluded; at least 100.

    Returns:
        The line. If the record was too long, its texts and lists are shortened alike and ``"clipped": true`` is added;
        if even that does not fit, only the size is kept.
    """
    line = encode(record)
    size, keep = len(line), max_bytes
    while len(line) > max_bytes and keep > 0:
        keep //= 2
        line = encode({**clip(record, keep), "clipped": True})
    return line if len(line) <= max_bytes else encode({"clipped": True, "bytes": size})


def clip(value: Any, keep: int) -> Any:
    """`value` with every text and list in it cut to its first `keep` characters or items."""
    if isinstance(value, str):
        return value if len(value) <= keep else value[:keep] + "…"
    if isinstance(value, Mapping):
        return {key: clip(item, keep) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clip(item, keep) for item in value[:keep]]
    return value
