"""The tokens of recorded turns with what engine and learner say of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from agentrl.core.annotations import MASKS, Annotation, as_plain
from agentrl.inspect.pieces import TokenTexts, split_messages

Record: TypeAlias = Mapping[str, Any]

FIELDS = ("logprob", "learner", "difference", "ratio", "weight", "advantage", "entropy", "loss", "reference", "value", "return")
"""Figures of a token; beside them a version, a staleness and a mask."""

MASK_TEXTS: Mapping[str, str] = {
    "trained": "trained",
    "off_policy": "not trained: the off-policy correction gave it the weight 0",
    "low_entropy": "not trained: its entropy is not among the highest (--top-entropy-share)",
    "clipped": "no or bounded gradient: the policy has moved too far at this token, and the loss clips",
    "skipped": "not trained: the gradient of its update was not finite",
    "warmup": "not trained: the policy waits while the critic warms up (--critic-warmup-steps)",
    "cut_short": "not trained: the episode was cut short (--mask-truncated)",
    "branch": "not trained: its branch is masked",
    "frozen": "not trained: its agent is not trained",
    "failed": "not trained: the episode failed",
    "filtered": "not trained: its group was filtered",
    "dropped": "not trained: its group was dropped",
    "retried": "not trained: its group was played again",
    "spare": "not trained: its group was oversampled for its step, and was given up",
    "evaluation": "not trained: it was played in an evaluation",
    "pending": "not trained yet",
    "unknown": "the run does not say (--annotate writes it down)",
    "not_action": "not sampled: the prompt, or what the environment said",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One trajectory of an episode, with what the learner wrote about it."""

    record: Record
    annotation: Annotation | None
    mask: str  # what became of its tokens where the learner wrote nothing: a key of `MASK_TEXTS`
    step: int | None  # step that trained it


def turn_views(parts: Sequence[Part], texts: TokenTexts | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the turns of an episode in order of time, and its branches with the places of their turns.

    Args:
        parts: The trajectories of the episode, one per agent.
        texts: Texts of tokens; `None` leaves them out.
    """
    views: list[dict[str, Any]] = []
    branches: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        offset = 0
        for index, turn in enumerate(_turns(part.record)):
            answered = not turn.get("_unanswered")
            if not index or turn.get("fresh"):
                branches.append(_branch(len(branches), number, part, turn))
            trained = answered and not turn.get("masked")
            tokens = _sampled(part, turn, offset if trained else None, texts)
            offset += len(turn.get("token_ids", ())) if trained else 0
            views.append(_view(turn, number, part, len(branches) - 1, texts) | {"tokens": tokens, "unanswered": not answered})
    order = sorted(range(len(views)), key=lambda place: (views[place]["number"], place))
    views = [views[place] | {"turn": turn} for turn, place in enumerate(order)]
    for view in views:
        branches[view["branch"]]["turns"].append(view["turn"])
    return views, _rooted(branches, views)


def _turns(record: Record) -> Iterator[dict[str, Any]]:
    turns = record.get("turns")
    for index, turn in enumerate(turns if isinstance(turns, list) else ()):
        if isinstance(turn, Mapping):
            yield {"number": index, **turn}
    if isinstance(turn := record.get("unanswered"), Mapping):
        yield {**turn, "_unanswered": True}


def _branch(number: int, trajectory: int, part: Part, turn: Record) -> dict[str, Any]:
    masked = str(turn.get("masked", ""))
    return {
        "branch": number,
        "trajectory": trajectory,
        "agent": str(part.record.get("agent", "")),
        "reason": str(turn.get("branch_reason", "")),
        "helper": str(turn.get("helper", "")),
        "masked": masked,
        "turns": [],
        "parent": None,
        "from_turn": None,
        "trained": part.annotation is not None and not masked,
        "step": part.step if not masked else None,
    }


def _rooted(branches: list[dict[str, Any]], views: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give every branch the one before it that shares the longest beginning of its tokens, and the last turn that it shares."""
    contexts: dict[int, list[tuple[int, list[int]]]] = {}  # of each branch: its turns with every token up to their ends
    for branch in branches:
        tokens: list[int] = []
        contexts[branch["branch"]] = []
        for turn in branch["turns"]:
            tokens = tokens + views[turn]["prompt"]["ids"] + views[turn]["tokens"]["ids"]
            contexts[branch["branch"]].append((turn, tokens))
    for branch in branches:
        if not branch["turns"]:
            continue
        first = views[branch["turns"][0]]["prompt"]["ids"]
        best = 0
        for other in branches[: branch["branch"]]:
            if other["agent"] != branch["agent"] or other["trajectory"] > branch["trajectory"]:
                continue
            for turn, tokens in contexts[other["branch"]]:
                if best < len(tokens) <= len(first) and first[: len(tokens)] == tokens:
                    best, branch["parent"], branch["from_turn"] = len(tokens), other["branch"], turn
            if branch["parent"] is None and branch["reason"]:
                branch["parent"] = other["branch"]
    return branches


def _view(turn: Record, number: int, part: Part, branch: int, texts: TokenTexts | None) -> dict[str, Any]:
    prompt, ids = str(turn.get("prompt_text", "")), _list(turn, "prompt_ids")
    return {
        "turn": 0,
        "number": int(turn.get("number", 0)),
        "trajectory": number,
        "branch": branch,
        "agent": str(part.record.get("agent", "")),
        "fresh": bool(turn.get("fresh")),
        "branch_reason": str(turn.get("branch_reason", "")),
        "rewritten": str(turn.get("rewritten", "")),
        "masked": str(turn.get("masked", "")),
        "prompt_text": prompt,
        "text": str(turn.get("text", "")),
        "prompt_messages": turn.get("prompt_messages") or split_messages(prompt),
        "finish_reason": turn.get("finish_reason"),
        "reward": turn.get("reward"),
        "reward_parts": turn.get("reward_parts") or {},
        "temperature": turn.get("temperature"),
        "info": turn.get("info") or {},
        "pictures": _list(turn, "pictures"),
        "prompt": {"ids": ids, "pieces": texts.pieces(ids) if texts is not None else None},
    }


def _sampled(part: Part, turn: Record, offset: int | None, texts: TokenTexts | None) -> dict[str, Any]:
    """The sampled tokens of a turn with their figures; `offset` is where its trajectory's annotation has them, `None` if nowhere."""
    ids, behaviour, versions = (_list(turn, name) for name in ("token_ids", "logprobs", "versions"))
    annotation, size = part.annotation, len(turn.get("token_ids", ()))
    figures: dict[str, npt.NDArray[Any]] = {}
    masks_of_tokens: list[str] | None = None
    if annotation is not None and offset is not None and offset + size <= len(annotation.masks):
        figures = {name: values[offset : offset + size] for name, values in annotation.figures.items()}
        masks_of_tokens = [str(MASKS[number]) for number in annotation.masks[offset : offset + size]]
    values: dict[str, Any] = dict.fromkeys(FIELDS)
    values["logprob"] = as_plain(_numbers(behaviour)) if behaviour else None
    values |= {"learner" if name == "logprob" else name: as_plain(learned) for name, learned in figures.items()}
    if "logprob" in figures and len(behaviour) == size:
        values["difference"] = as_plain(figures["logprob"] - _numbers(behaviour), 4)
    pieces, step = texts.pieces(ids) if texts is not None else None, part.step
    return {
        "ids": ids,
        "pieces": pieces,
        "exact": pieces is not None and "".join(pieces) == str(turn.get("text", "")),
        "version": _same(versions),
        "staleness": _same([step - 1 - version for version in versions]) if step is not None and masks_of_tokens is not None else None,
        **values,
        "mask": _mask(part, turn, masks_of_tokens),
    }


def _mask(part: Part, turn: Record, learned: list[str] | None) -> str | list[str]:
    """Masks of the sampled tokens of a turn, one if they are the same; `learned` are those that the learner wrote."""
    if turn.get("masked"):
        return "branch"
    if turn.get("_unanswered"):
        return "failed"
    if learned is None:
        return "unknown" if part.mask == "trained" else part.mask
    return learned[0] if len(set(learned)) == 1 else learned


def _list(turn: Record, name: str) -> list[int]:
    values = turn.get(name)
    return values if isinstance(values, list) else []


def _numbers(values: Iterable[float | None]) -> npt.NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _same(values: Sequence[int]) -> int | list[int] | None:
    return None if not values else values[0] if len(set(values)) == 1 else list(values)


def every_value(value: Any, count: int) -> list[Any]:
    """Return one value per token, of an array, of one value for all tokens, or of nothing."""
    return list(value) if isinstance(value, list) else [value] * count


def ranges(views: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the least and the largest value of each figure that some token has."""
    extremes: dict[str, list[float]] = {}
    for view in views:
        for name in (*FIELDS, "version", "staleness"):
            values = [number for number in every_value(view["tokens"][name], 1) if number is not None]
            if values and view["tokens"]["ids"]:
                low, high = extremes.get(name, (values[0], values[0]))
                extremes[name] = [min(low, *values), max(high, *values)]
    return extremes


def masks(views: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the masks that occur, with a sentence on each."""
    texts = {"not_action": MASK_TEXTS["not_action"]}
    for view in views:
        for name in every_value(view["tokens"]["mask"], 1):
            texts[name] = f"not trained: {view['masked']}" if name == "branch" and view["masked"] else MASK_TEXTS[name]
    return texts
