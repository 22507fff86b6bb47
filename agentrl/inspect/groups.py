"""Fates of groups, as ``groups.jsonl`` and ``steps.jsonl`` say it, or as far as recorded episodes tell."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.inspect.reader import RunReader
from agentrl.track.index import TRAINING

MANY = 500
"""Values in one SQL query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """Facts about one attempt at a group.

    Attributes:
        group: Number of the group.
        attempt: Number of the attempt; `None` if nothing is known.
        line: Its line of ``groups.jsonl``; `None` if the run has none.
        step: Step that trained it; `None` if none did or that is not known.
        spare: True if it was started for a step and given up.
        episodes: Rows of its recorded episodes: name, episode, task, status, reward, score, tokens, turns, ended_s, step.
    """

    group: int
    attempt: int | None = None
    line: Mapping[str, Any] | None = None
    step: int | None = None
    spare: bool = False
    episodes: Sequence[tuple[Any, ...]] = ()

    @property
    def verdict(self) -> str | None:
        """``kept``, ``filtered``, ``dropped``, ``retried``, ``spare``, or `None` if that is not recorded."""
        return "spare" if self.spare else self.line.get("verdict") if self.line is not None else None

    @property
    def reason(self) -> str:
        """Reason for which it was not kept."""
        return "oversampled" if self.spare else str(self.line.get("reason") or "") if self.line is not None else ""

    def row(self) -> dict[str, Any]:
        """Return the group as lists show it."""
        line = self.line or {}
        rewards = line.get("rewards", [row[4] for row in self.episodes])
        known = [value for value in rewards if value is not None]
        versions, ended_s, seconds = line.get("versions"), line.get("ended_s"), line.get("group_s")
        if ended_s is None and self.episodes:
            ended_s = self.episodes[-1][8]
        spread = statistics.pstdev(known) if known else None
        return {
            "group": self.group,
            "attempt": self.attempt or 0,
            "task": line.get("task_id", self.episodes[0][2] if self.episodes else None),
            "verdict": self.verdict,
            "reason": self.reason,
            "rewards": rewards,
            "scores": line.get("scores", [row[5] for row in self.episodes]),
            "statuses": line.get("statuses", [row[3] for row in self.episodes]),
            "reward_mean": statistics.fmean(known) if known else None,
            "reward_std": spread,
            "flat": spread is not None and spread < 1e-9 and len(known) > 1,
            "version": line.get("version", self.episodes[0][9] - 1 if self.episodes else None),
            "versions": versions,
            "staleness": self.step - 1 - versions[0] if self.step is not None and versions else None,
            "seconds": seconds,
            "started_s": ended_s - seconds if ended_s is not None and seconds is not None else None,
            "ended_s": ended_s,
            "worker": line.get("worker") or None,
            "step": self.step,
            "tokens": line.get("tokens", [row[6] for row in self.episodes]),
            "turns": line.get("turns", [row[7] for row in self.episodes]),
            "errors": line.get("errors", []),
            "recorded": list(dict.fromkeys(row[1] for row in self.episodes)),
        }


def find_group(run: RunReader, group: int, attempt: int | None = None, source: str = TRAINING) -> GroupFacts:
    """Return what is known of a group: of its last attempt, or of the one that is asked for."""
    if source == TRAINING:
        return find_groups(run, [group], {} if attempt is None else {group: attempt})[0]
    return _facts(group, None, None, _episodes(run, [group], source).get(group, []), attempt)


def find_groups(run: RunReader, groups: Sequence[int], attempts: Mapping[int, int] | None = None) -> list[GroupFacts]:
    """Return what is known of several groups of the training, in their order."""
    attempts = attempts or {}
    places: dict[int, tuple[int, int, int]] = {}
    steps: dict[int, tuple[int, int]] = {}
    for part in _parts(groups):
        marks = ", ".join("?" * len(part))
        sql = f'SELECT "group", attempt, start, bytes FROM groups WHERE "group" IN ({marks}) ORDER BY attempt, id'
        # Rows come in the order of attempts, so the last attempt is the one that stays.
        places |= {row[0]: row[1:] for row in run.store.query(sql, part) if row[0] not in attempts or attempts[row[0]] == row[1]}
        sql = f'SELECT "group", step, spare FROM members WHERE "group" IN ({marks})'
        steps |= {row[0]: row[1:] for row in run.store.query(sql, part)}
    lines = {row["group_id"]: row for row in run.store.lines("groups", [place[1:] for place in places.values()])}
    episodes = _episodes(run, groups, TRAINING)
    return [_facts(group, lines.get(group), steps.get(group), episodes.get(group, []), attempts.get(group)) for group in groups]


def _facts(
    group: int, line: Mapping[str, Any] | None, step: tuple[int, int] | None, episodes: Sequence[tuple[Any, ...]], attempt: int | None
) -> GroupFacts:
    if attempt is None:
        attempt = line["attempt"] if line is not None else max((row[10] for row in episodes), default=None)
    own = [row for row in episodes if row[10] == attempt]
    trained = step is not None and not step[1] and (line is None or line.get("verdict") == "kept")
    spare = step is not None and bool(step[1])
    return GroupFacts(group=group, attempt=attempt, line=line, step=step[0] if step and trained else None, spare=spare, episodes=own)


def _episodes(run: RunReader, groups: Sequence[int], source: str) -> dict[int, list[tuple[Any, ...]]]:
    by_group: dict[int, list[tuple[Any, ...]]] = {}
    for part in _parts(groups):
        sql = (
            'SELECT name, episode, task, status, reward, score, tokens, turns, ended_s, step, attempt, "group" FROM episodes '
            f'WHERE "group" IN ({", ".join("?" * len(part))}) AND source = ? ORDER BY id'
        )
        for row in run.store.query(sql, (*part, source)):
            by_group.setdefault(row[11], []).append(row)
    return by_group


def _parts(groups: Sequence[int]) -> Iterable[Sequence[int]]:
    return (groups[start : start + MANY] for start in range(0, len(groups), MANY))
