"""One recorded episode on a screen, turn by turn, with the tokens that the model itself thought unlikely."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from agentrl.track.screen import Screen

Record: TypeAlias = Mapping[str, Any]
Pieces: TypeAlias = Callable[[Sequence[int]], list[str]]
"""The text of each of some tokens."""

UNLIKELY = 0.1
"""Tokens sampled with a lower probability are pointed out."""
MAX_LISTED = 8


def show_episode(screen: Screen, records: Sequence[Record], pieces: Pieces | None, *, logprobs: bool = False) -> None:
    """Print an episode.

    Args:
        screen: Where to.
        records: One, or one per agent.
        pieces: Spells tokens; `None`: not known.
        logprobs: Print the log-probability of every sampled token.
    """
    first = records[0]
    _head(screen, records)
    turns = [(str(record.get("agent", "")), turn, "") for record in records for turn in record.get("turns", ())]
    turns = sorted(turns, key=lambda item: int(item[1].get("number", 0)))
    turns += [(str(record.get("agent", "")), record["unanswered"], "not answered") for record in records if record.get("unanswered")]
    for index, (agent, turn, note) in enumerate(turns, start=1):
        title = f"turn {index}" + (f"  {agent}" if agent else "") + (f"  {note}" if note else "")
        show_turn(screen, title, turn, pieces, logprobs=logprobs)
    if first.get("error"):
        screen.line()
        screen.line((str(first["error"]), "red"))


def _head(screen: Screen, records: Sequence[Record]) -> None:
    first = records[0]
    task = first.get("task", {})
    if first.get("clipped"):
        screen.line(("The record was cut, because it was too long.", "yellow"))
    version = f"weights of version {first.get('version', '?')} at its beginning, attempt {int(first.get('attempt', 0)) + 1}"
    rows = [
        ("episode", f"{first.get('episode_id', '?')}  group {first.get('group_id', '?')}, {version}"),
        ("task", f"{task.get('id', '?')}  epoch {task.get('epoch', '?')}, position {task.get('position', '?')}"),
        ("label", str(task.get("literals", {}).get("label", task.get("label")))),
        ("status", str(first.get("status", "?"))),
    ]
    rows += [("metadata", str(task["metadata"]))] if task.get("metadata") else []
    for record in records:
        who = f"{record['agent']}  " if record.get("agent") else ""
        parts = "".join(f"  {name} {value:.6g}" for name, value in record.get("reward_parts", {}).items())
        rows.append(("reward", f"{who}{_number(record.get('reward'))}  score {_number(record.get('score'))}{parts}"))
    metrics = "  ".join(f"{name} {_number(value)}" for name, value in first.get("metrics", {}).items())
    rows += [("metrics", metrics)] if metrics else []
    timings = "  ".join(f"{name.removesuffix('_s')} {value:.3g} s" for name, value in first.get("timings", {}).items())
    rows += [("time", timings)] if timings else []
    for label, text in rows:
        screen.line((f"{label:<10}", "bold cyan"), text, indent=0)


def show_turn(screen: Screen, title: str, turn: Record, pieces: Pieces | None, *, logprobs: bool = False) -> None:
    """Print what the model read, what it wrote and what that earned."""
    values, versions = turn["logprobs"], sorted(set(turn["versions"]))
    spelled = pieces(turn["token_ids"]) if pieces is not None else []
    screen.line()
    screen.line((title, "bold"), (f"  {_facts(turn, versions)}", "dim"))
    screen.line((turn["prompt_text"], "dim"), indent=4)
    if len(spelled) == len(values) and "".join(spelled) == turn["text"]:
        screen.line(*((piece, _style(value)) for piece, value in zip(spelled, values, strict=True)), indent=2)
    else:
        screen.line(turn["text"], indent=2)
    info = "".join(f"  {name} {_number(value)}" for name, value in turn.get("info", {}).items())
    screen.line(("reward ", "cyan"), f"{_number(turn['reward'])}{info}", indent=4)
    show_logprobs(screen, values, spelled or [str(token) for token in turn["token_ids"]], every=logprobs)


def show_logprobs(screen: Screen, values: Sequence[float], spelled: Sequence[str], *, every: bool = False) -> None:
    """Print the mean log-probability and the unlikely tokens, or every token.

    Args:
        screen: Where to.
        values: One log-probability per token.
        spelled: One text per token.
        every: Print every token.
    """
    if not values:
        return
    parts: list[str | tuple[str, str]] = [("log-probability ", "cyan"), f"mean {sum(values) / len(values):.3f}, lowest {min(values):.3f}"]
    pairs = list(zip(spelled, values, strict=True))
    unlikely = sorted((pair for pair in pairs if math.exp(pair[1]) < UNLIKELY), key=lambda pair: pair[1])
    if unlikely and not every:
        parts.append("; unlikely: ")
        for index, (piece, value) in enumerate(unlikely[:MAX_LISTED]):
            parts += [", " if index else "", (repr(piece), _style(value)), f" {100 * math.exp(value):.2g}%"]
        parts += [f" and {len(unlikely) - MAX_LISTED} more"] if len(unlikely) > MAX_LISTED else []
    screen.line(*parts, indent=4)
    for start in range(0, len(pairs) if every else 0, MAX_LISTED):
        row: list[str | tuple[str, str]] = []
        for piece, value in pairs[start : start + MAX_LISTED]:
            row += [(repr(piece), _style(value)), f" {value:.3f}   "]
        screen.line(*row, indent=4)


def _facts(turn: Record, versions: Sequence[int]) -> str:
    count = len(turn["token_ids"])
    version = f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}" if versions else "no version"
    read = f"{len(turn['prompt_ids'])} tokens read"
    return f"{read}, {count} sampled by {version} at temperature {turn['temperature']:g}, ended by {turn['finish_reason']}"


def _style(logprob: float) -> str:
    probability = math.exp(logprob)
    return "bold red" if probability < UNLIKELY / 10 else "yellow" if probability < UNLIKELY else ""


def _number(value: Any) -> str:
    return "none" if value is None else f"{value:.6g}" if isinstance(value, int | float) else str(value)
