"""Built-in callbacks that write down what became of groups, when steps happened, and how the run was started."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from agentrl.core.callbacks import Callback, EvaluationEnd, GroupJudged, RunBegin, RunEnd, StepEnd
from agentrl.core.redaction import redacted_words
from agentrl.core.summaries import MemberSummary
from agentrl.track.jsonl import JsonLines, encode

MAX_CAUSE = 300


class GroupRecorder(Callback):
    """Appends a line for every attempt at a group: what was decided and why, and the rewards of all members, recorded or not."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._lines, self._clock = JsonLines(path), clock

    def on_group_judged(self, event: GroupJudged) -> None:
        """Write the line of the group; one entry per trajectory in each list."""
        members = event.summary.members
        line = {
            "group_id": event.group_id,
            "attempt": event.attempt,
            "task_id": event.task_id,
            "epoch": event.task.epoch,
            "verdict": event.verdict,
            "reason": event.reason,
            "version": event.version,
            "versions": event.summary.versions,
            "worker": event.summary.worker,
            "ended_s": round(self._clock(), 4),
            "group_s": round(event.summary.seconds, 4),
            "episodes": [member.episode_id for member in members],
            "statuses": [str(member.status) for member in members],
            "rewards": [member.reward for member in members],
            "scores": [member.score for member in members],
            "tokens": [member.num_tokens for member in members],
            "turns": [member.num_turns for member in members],
            **({"agents": [member.agent for member in members]} if any(member.agent for member in members) else {}),
            **({"errors": errors} if (errors := _errors(members)) else {}),
        }
        self._lines.write(encode(line))

    def on_run_end(self, event: RunEnd) -> None:
        """Close the file."""
        self._lines.close()


def _errors(members: tuple[MemberSummary, ...]) -> list[str]:
    """Return the first line of each error, every one once."""
    return list(dict.fromkeys(member.error.partition("\n")[0][:MAX_CAUSE] for member in members if member.error))


class StepRecorder(Callback):
    """Appends a line for every step: its groups, and when each part of it began and ended, in seconds since 1970."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._lines, self._clock = JsonLines(path), clock
        self._evaluation: list[float] | None = None

    def on_evaluation_end(self, event: EvaluationEnd) -> None:
        """Keep the time of the evaluation for the line of its step."""
        now = self._clock()
        self._evaluation = [round(now - event.seconds, 4), round(now, 4)]

    def on_step_end(self, event: StepEnd) -> None:
        """Write the line of the step."""
        line: dict[str, Any] = {"step": event.step, "groups": list(event.groups), "spare": list(event.oversampled)}
        # The run's clock does not begin in 1970; both clocks are read at the same moment.
        offset = self._clock() - event.times.get("now_s", 0.0)
        line |= {name: round(offset + seconds, 4) for name, seconds in event.times.items() if name != "now_s"}
        if self._evaluation is not None:
            line["evaluation_s"], self._evaluation = self._evaluation, None
        self._lines.write(encode(line))

    def on_run_end(self, event: RunEnd) -> None:
        """Close the file."""
        self._lines.close()


class LaunchRecorder(Callback):
    """Appends a line for every start or continuation of the run: the command, and the process, so that a reader can tell if it lives."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_run_begin(self, event: RunBegin) -> None:
        """Write the line."""
        lines = JsonLines(self._path)
        lines.write(encode({**launch(), "resumed": event.resumed, "step": event.step}))
        lines.close()


def launch() -> dict[str, Any]:
    """Facts about this process in JSON's own types; `started_s` of a process and its number are no other process's on the machine."""
    process = psutil.Process()
    return {
        "command": shlex.join([_program(Path(sys.argv[0])), *redacted_words(sys.argv[1:])]),
        "folder": str(Path.cwd()),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_s": process.create_time(),
        "started_s": round(time.time(), 4),
        "version": _version(),
    }


def _version() -> str:
    try:
        return version("agentrl")
    except PackageNotFoundError:
        return ""


def _program(path: Path) -> str:
    """The name by which a person starts the program; ``python -m agentrl`` is ``agentrl``."""
    return "agentrl" if path.parts[-2:] == ("agentrl", "__main__.py") else path.name
