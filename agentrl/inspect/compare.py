"""A replayed episode beside its records: the first thing, in order of time, that is not the same."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from agentrl.core.types import Status, Trajectory, Turn
from agentrl.rollout.records import recorded_turn
from agentrl.track.text import Screen, counted, duration, text_difference

TOLERANCE = 1e-9
INTERRUPTED = (Status.TIMEOUT, Status.ENGINE_ERROR)
"""Ends that depend on time and on the engine; they are not waited for again."""

Records: TypeAlias = Sequence[Mapping[str, Any]]
"""Records of one episode: one, or one for each of its agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first thing that was not as recorded; `expected` and `got` are text for people, and for an observation its tokens too."""

    turn: int  # from 0, with the observation before it
    what: str  # observation, reward, reward part NAME, score, end, or agent: the one that acts
    expected: str
    got: str
    agent: str = ""
    expected_ids: tuple[int, ...] = ()
    got_ids: tuple[int, ...] = ()


class Verdict(StrEnum):
    """Result of a replay."""

    SAME = "same"
    """Every observation, reward, the score and the end were as recorded."""
    DIFFERS = "differs"
    """Something was not."""
    SKIPPED = "skipped"
    """There was nothing to compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The outcome of one replay; `reason` tells why it was skipped, or what limits or explains the outcome."""

    records: Records
    verdict: Verdict
    difference: Difference | None = None
    reason: str = ""
    offline: bool = False  # recorded requests were driven through the endpoint, and no agent was run

    @property
    def episode_id(self) -> str:
        """Name of the episode."""
        return str(self.records[0].get("episode_id", "?"))


@dataclass(frozen=True, slots=True)
class _Episode:
    """The turns of all agents in order of time, each with its agent's name, and the one that was not answered."""

    turns: list[tuple[str, Turn]]
    unanswered: tuple[str, Turn] | None
    status: Status
    error: str | None


def first_difference(records: Sequence[Mapping[str, Any]], replayed: Sequence[Trajectory], *, penalized: bool = False) -> Difference | None:
    """Return the first difference of an episode from its records, one per agent; `None` if observations, rewards, scores and end agree.

    With `penalized`, rewards include penalties for length, which only episodes that ended properly pay.
    """
    then, now = _recorded(records), _replayed(replayed)
    comparable = not penalized or then.status.trainable == now.status.trainable
    for number, (old, new) in enumerate(zip(then.turns, now.turns, strict=False)):
        if (found := _turn(number, old, new, rewards=comparable)) is not None:
            return found
    if len(then.turns) == len(now.turns) and then.unanswered and now.unanswered:
        found = _turn(len(now.turns), then.unanswered, now.unanswered, rewards=False)
        if found is not None:
            return found
    ended_alike = now.status is (Status.ENGINE_ERROR if then.status in INTERRUPTED else then.status)
    if len(then.turns) != len(now.turns) or not ended_alike:
        return _end(then, now)
    return _totals(records, replayed, max(len(then.turns) - 1, 0)) if then.status.trainable else None


def _turn(number: int, old: tuple[str, Turn], new: tuple[str, Turn], *, rewards: bool) -> Difference | None:
    (agent, then), (actor, now) = old, new
    if agent != actor:
        return Difference(turn=number, what="agent", expected=agent, got=actor, agent=agent)
    expected, got = tuple(then.prompt_ids.tolist()), tuple(now.prompt_ids.tolist())
    if expected != got:
        texts = {"expected": then.prompt_text, "got": now.prompt_text}
        return Difference(turn=number, what="observation", agent=agent, **texts, expected_ids=expected, got_ids=got)
    if rewards and not _close(then.reward, now.reward):
        return Difference(turn=number, what="reward", expected=_value(then.reward), got=_value(now.reward), agent=agent)
    return None


def _end(then: _Episode, now: _Episode) -> Difference:
    """The episode ended elsewhere, or otherwise; the turn is the one whose answer decided that."""
    before, after = len(then.turns), len(now.turns)
    expected = "it goes on" if before > after or then.status in INTERRUPTED else _ended(then)
    got = _ended(now)
    if after > before:
        got = f"an answer with reward {_value(now.turns[before][1].reward)}"
    elif after == before and now.status is Status.ENGINE_ERROR:
        got = "it goes on"
    failed = after > before or now.unanswered is not None
    return Difference(turn=max(min(before, after) - (not failed), 0), what="end", expected=expected, got=got)


def _ended(episode: _Episode) -> str:
    first, turns = next(iter((episode.error or "").splitlines()), ""), len(episode.turns)
    return f"{episode.status} after {counted(turns, 'turn')}" + (f": {first}" if first else "")


def _totals(records: Sequence[Mapping[str, Any]], replayed: Sequence[Trajectory], last: int) -> Difference | None:
    by_agent = {trajectory.agent: trajectory for trajectory in replayed}
    for record in records:
        now = by_agent[record["agent"]]
        pairs = [("score", record["score"], now.score), ("reward", record["reward"], now.reward)]
        names = dict.fromkeys((*record["reward_parts"], *now.reward_parts))
        pairs += [(f"reward part {name}", record["reward_parts"].get(name), now.reward_parts.get(name)) for name in names]
        for what, expected, got in pairs:
            if not _close(expected, got):
                return Difference(turn=last, what=what, expected=_value(expected), got=_value(got), agent=now.agent)
    return None


def _recorded(records: Sequence[Mapping[str, Any]]) -> _Episode:
    turns = [(record["agent"], recorded_turn(turn, index)) for record in records for index, turn in enumerate(record["turns"])]
    unanswered = ((record["agent"], recorded_turn(record["unanswered"])) for record in records if record.get("unanswered"))
    return _Episode(_in_order(turns), next(unanswered, None), Status(records[0]["status"]), records[0]["error"])


def _replayed(trajectories: Sequence[Trajectory]) -> _Episode:
    turns = [(trajectory.agent, turn) for trajectory in trajectories for turn in trajectory.turns]
    unanswered = ((trajectory.agent, trajectory.unanswered) for trajectory in trajectories if trajectory.unanswered is not None)
    return _Episode(_in_order(turns), next(unanswered, None), trajectories[0].status, trajectories[0].error)


def _in_order(turns: list[tuple[str, Turn]]) -> list[tuple[str, Turn]]:
    return sorted(turns, key=lambda pair: pair[1].number)


def _close(expected: float | None, got: float | None) -> bool:
    if expected is None or got is None:
        return expected is got
    return math.isclose(expected, got, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _value(number: float | None, digits: int = 12) -> str:
    return "none" if number is None else f"{number:.{digits}g}"


def show_replays(screen: Screen, outcomes: Sequence[Replay], seconds: float, *, run: str, agent: str = "", limit: int = 20) -> None:
    """Print the share of a run's episodes that replay, and up to `limit` differences; `run` and `agent` are as the user named them."""
    same, differs, skipped = ([outcome for outcome in outcomes if outcome.verdict == kind] for kind in ("same", "differs", "skipped"))
    compared = len(same) + len(differs)
    turns = sum(len(record["turns"]) for outcome in same for record in outcome.records)
    share = f"{100 * len(same) / compared:.4g}%" if compared else "none"
    screen.line(
        (share, "bold green" if not differs else "bold red"),
        f" of the episodes replay: {len(same)} of {compared}, {turns} turns, in {duration(seconds)}",
    )
    for reason, count in Counter(outcome.reason for outcome in same if outcome.reason).most_common():
        screen.line(f"of these {count} {reason}", indent=2)
    for reason, count in Counter(outcome.reason for outcome in skipped).most_common():
        screen.line((f"{count} not compared: {reason}", "yellow"), prose=True)
    if not differs:
        return
    for reason, count in Counter(outcome.reason for outcome in differs).most_common():
        screen.line((f"{count} differ: {reason}", "red"), prose=True)
    screen.line()
    screen.table(("episode", "task", "turn#", "differs in", "expected", "got"), [_row(outcome) for outcome in differs[:limit]])
    if len(differs) > limit:
        screen.line(f"and {len(differs) - limit} more (--show {len(differs)})")
    words = ["--agent", agent] if agent else []
    command = shlex.join(["agentrl", "replay", run, differs[0].episode_id, *words])
    screen.line(f"`{command}` shows one in full.")


def _row(outcome: Replay) -> tuple[str, ...]:
    found = outcome.difference
    if found is None:
        return (outcome.episode_id, _task_name(outcome), "", "", "", "")
    what = f"{found.what} ({found.agent})" if found.agent else found.what
    expected, got = (_short(text, other) for text, other in ((found.expected, found.got), (found.got, found.expected)))
    return (outcome.episode_id, _task_name(outcome), str(found.turn + 1), what, expected, got)


def _short(text: str, other: str, width: int = 40) -> str:
    """The part of a text from shortly before where it differs from another."""
    same = next((index for index, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), min(len(text), len(other)))
    start = max(0, same - 12) if len(text) > width else 0
    cut = text[start : start + width]
    return ("..." if start else "") + cut + ("..." if start + width < len(text) else "")


def show_replay(screen: Screen, outcome: Replay) -> None:
    """Print the outcome of one replay, with its difference in full."""
    record = outcome.records[0]
    turns = sum(len(record["turns"]) for record in outcome.records)
    count = counted(turns, "turn")
    rewards = ", ".join(f"{record['agent'] or 'reward'} {_value(record['reward'], 6)}" for record in outcome.records)
    screen.line(
        (f"episode {outcome.episode_id}", "bold"), f"  task {_task_name(outcome)}, {count}, {record['status']}, {rewards}", prose=True
    )
    found = outcome.difference
    if outcome.verdict == "skipped":
        screen.line(("not compared", "yellow"), f": {outcome.reason}", prose=True)
    elif found is None:
        note = f", {outcome.reason}" if outcome.reason else ""
        same = "every prompt, branch and mask is" if outcome.offline else "every observation, every reward, the score and the end are"
        screen.line(("replays", "green"), f": {same} the same{note}", prose=True)
    else:
        who = f", agent {found.agent}" if found.agent else ""
        where = f"request {found.turn + 1}" if outcome.offline else f"turn {found.turn + 1} of {max(turns, found.turn + 1)}"
        screen.line(("differs", "bold red"), f" at {where}{who}: {found.what}")
        _show_difference(screen, outcome)
        screen.line(outcome.reason, prose=True)


def _show_difference(screen: Screen, outcome: Replay) -> None:
    found = outcome.difference
    if found is None:
        return
    if not found.expected_ids and not found.got_ids:
        screen.line(("expected  ", "red"), found.expected, indent=2)
        screen.line(("got       ", "green"), found.got, indent=2)
        return
    pairs = zip(found.expected_ids, found.got_ids, strict=False)
    at = next((index for index, (then, now) in enumerate(pairs) if then != now), min(len(found.expected_ids), len(found.got_ids)))
    then, now = (str(ids[at]) if at < len(ids) else "nothing" for ids in (found.expected_ids, found.got_ids))
    lengths = f"{len(found.expected_ids)} expected, {len(found.got_ids)} got"
    screen.line(f"first different token: number {at} of the {found.what}, {then} expected, {now} got ({lengths} in all)", indent=2)
    if found.expected == found.got:
        screen.line("the text is the same: the tokenizer or its chat template is not that of the run", indent=2)
    for line, style in text_difference(found.expected, found.got):
        screen.line((line, style), indent=2)


def _task_name(outcome: Replay) -> str:
    return str((outcome.records[0].get("task") or {}).get("id", "?"))
