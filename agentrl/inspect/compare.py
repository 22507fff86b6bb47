"""A replayed episode beside its records: the first thing, in order of time, that is not the same."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeAlias

from agentrl.core.differences import AGENT, END, Difference, Tokens, TurnValues, first_difference, first_place, in_words
from agentrl.core.types import Status, Trajectory, Turn
from agentrl.rollout.records import recorded_turn
from agentrl.track.text import Screen, counted, duration, text_difference

TOLERANCE = 1e-9
INTERRUPTED = (Status.TIMEOUT, Status.ENGINE_ERROR)
"""Ends that depend on time and on the engine; they are not waited for again."""

Records: TypeAlias = Sequence[Mapping[str, Any]]
"""Records of one episode: one, or one for each of its agents."""


class Verdict(StrEnum):
    """Result of a replay."""

    SAME = "same"
    """Every observation, reward, the score and the end were as recorded."""
    DIFFERS = "differs"
    """A value was not."""
    SKIPPED = "skipped"
    """The episode had nothing to compare."""


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
    """The turns of all agents in order of time, the one that was not answered, and the end."""

    turns: list[TurnValues]
    unanswered: TurnValues | None
    status: Status
    error: str | None


def replay_difference(
    records: Sequence[Mapping[str, Any]], replayed: Sequence[Trajectory], *, penalized: bool = False
) -> Difference | None:
    """Return the first difference of an episode from its records, one per agent; `None` if observations, rewards, scores and end agree.

    With `penalized`, rewards include penalties for length, which only episodes that ended properly pay.
    """
    turns = [(record["agent"], recorded_turn(turn, index)) for record in records for index, turn in enumerate(record["turns"])]
    left = [(record["agent"], recorded_turn(record["unanswered"])) for record in records if record.get("unanswered")]
    then = _episode(turns, left, Status(records[0]["status"]), records[0]["error"])
    turns = [(trajectory.agent, turn) for trajectory in replayed for turn in trajectory.turns]
    left = [(trajectory.agent, trajectory.unanswered) for trajectory in replayed if trajectory.unanswered is not None]
    now = _episode(turns, left, replayed[0].status, replayed[0].error)
    expected: Sequence[TurnValues] = then.turns
    got: Sequence[TurnValues] = now.turns
    if len(expected) == len(got) and then.unanswered and now.unanswered:
        expected, got = [*expected, then.unanswered], [*got, now.unanswered]
    if penalized and then.status.trainable != now.status.trainable:
        expected, got = ([{**values, "reward": None} for values in part] for part in (expected, got))
    difference = first_difference(expected, got, tolerance=TOLERANCE)
    if difference is not None and difference.what != END:
        return difference
    # The replay of an interrupted episode runs out of recorded answers, which is an error of the engine here.
    if difference is not None or now.status is not (Status.ENGINE_ERROR if then.status in INTERRUPTED else then.status):
        return _end(then, now)
    return _totals(records, replayed, max(len(then.turns) - 1, 0)) if then.status.trainable else None


def _episode(turns: Iterable[tuple[str, Turn]], unanswered: Iterable[tuple[str, Turn]], status: Status, error: str | None) -> _Episode:
    in_order = sorted(turns, key=lambda pair: pair[1].number)
    values: list[TurnValues] = [{**_read(agent, turn), "reward": turn.reward} for agent, turn in in_order]
    return _Episode(values, next((_read(agent, turn) for agent, turn in unanswered), None), status, error)


def _read(agent: str, turn: Turn) -> TurnValues:
    return {AGENT: agent, "observation": Tokens(tuple(turn.prompt_ids.tolist()), turn.prompt_text)}


def _end(then: _Episode, now: _Episode) -> Difference:
    """The episode ended elsewhere, or otherwise; the turn is the one whose answer decided that."""
    before, after = len(then.turns), len(now.turns)
    expected = "it goes on" if before > after or then.status in INTERRUPTED else _ended(then)
    got = _ended(now)
    if after > before:
        got = f"an answer with reward {in_words(now.turns[before]['reward'])}"
    elif after == before and now.status is Status.ENGINE_ERROR:
        got = "it goes on"
    failed = after > before or now.unanswered is not None
    return Difference(turn=max(min(before, after) - (not failed), 0), what=END, expected=expected, got=got)


def _ended(episode: _Episode) -> str:
    first, turns = next(iter((episode.error or "").splitlines()), ""), len(episode.turns)
    return f"{episode.status} after {counted(turns, 'turn')}" + (f": {first}" if first else "")


def _totals(records: Sequence[Mapping[str, Any]], replayed: Sequence[Trajectory], last: int) -> Difference | None:
    """Compare the scores and the rewards of whole episodes, which count as values of the last turn."""
    by_agent = {trajectory.agent: trajectory for trajectory in replayed}
    for record in records:
        now = by_agent[record["agent"]]
        both = ((record["score"], record["reward"], record["reward_parts"]), (now.score, now.reward, now.reward_parts))
        expected, got = (
            {AGENT: now.agent, "score": score, "reward": reward, **{f"reward part {name}": value for name, value in parts.items()}}
            for score, reward, parts in both
        )
        if (difference := first_difference([expected], [got], tolerance=TOLERANCE)) is not None:
            return replace(difference, turn=last)
    return None


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
    difference = outcome.difference
    if difference is None:
        return (outcome.episode_id, _task_name(outcome), "", "", "", "")
    what = f"{difference.what} ({difference.agent})" if difference.agent else difference.what
    expected, got = difference.expected, difference.got
    return (outcome.episode_id, _task_name(outcome), str(difference.turn + 1), what, _short(expected, got), _short(got, expected))


def _short(text: str, other: str, width: int = 40) -> str:
    """The part of a text from shortly before where it differs from another."""
    place = first_place(text, other)
    start = max(0, (len(text) if place is None else place) - 12) if len(text) > width else 0
    cut = text[start : start + width]
    return ("..." if start else "") + cut + ("..." if start + width < len(text) else "")


def show_replay(screen: Screen, outcome: Replay) -> None:
    """Print the outcome of one replay, with its difference in full."""
    record, difference = outcome.records[0], outcome.difference
    turns = sum(len(record["turns"]) for record in outcome.records)
    rewards = ((record["agent"] or "reward", record["reward"]) for record in outcome.records)
    earned = ", ".join(f"{name} none" if reward is None else f"{name} {reward:.6g}" for name, reward in rewards)
    about = f"  task {_task_name(outcome)}, {counted(turns, 'turn')}, {record['status']}, {earned}"
    screen.line((f"episode {outcome.episode_id}", "bold"), about, prose=True)
    if outcome.verdict == "skipped":
        screen.line(("not compared", "yellow"), f": {outcome.reason}", prose=True)
    elif difference is None:
        note = f", {outcome.reason}" if outcome.reason else ""
        same = "every prompt, branch and mask is" if outcome.offline else "every observation, every reward, the score and the end are"
        screen.line(("replays", "green"), f": {same} the same{note}", prose=True)
    else:
        who = f", agent {difference.agent}" if difference.agent else ""
        number = difference.turn + 1
        where = f"request {number}" if outcome.offline else f"turn {number} of {max(turns, number)}"
        screen.line(("differs", "bold red"), f" at {where}{who}: {difference.what}")
        _show_difference(screen, difference)
        screen.line(outcome.reason, prose=True)


def _show_difference(screen: Screen, difference: Difference) -> None:
    if not difference.expected_ids and not difference.got_ids:
        screen.line(("expected  ", "red"), difference.expected, indent=2)
        screen.line(("got       ", "green"), difference.got, indent=2)
        return
    both, at = (difference.expected_ids, difference.got_ids), difference.token
    then, now = (str(ids[at]) if at < len(ids) else "nothing" for ids in both)
    lengths = f"{len(both[0])} expected, {len(both[1])} got"
    screen.line(f"first different token: number {at} of the {difference.what}, {then} expected, {now} got ({lengths} in all)", indent=2)
    if difference.expected == difference.got:
        screen.line("the text is the same: the tokenizer or its chat template is not that of the run", indent=2)
    for line, style in text_difference(difference.expected, difference.got):
        screen.line((line, style), indent=2)


def _task_name(outcome: Replay) -> str:
    return str((outcome.records[0].get("task") or {}).get("id", "?"))
