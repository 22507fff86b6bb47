"""The tokens of a step that stand out most in a figure: what is behind a spike of a curve."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from agentrl.core.annotations import Annotation, read_annotation
from agentrl.core.errors import ConfigError
from agentrl.inspect.episode import parts_of
from agentrl.inspect.reader import RunReader
from agentrl.inspect.tokens import every_value, turn_views

Array: TypeAlias = npt.NDArray[Any]

NEAR = 6
"""Tokens around one that are shown with it."""

BY: Mapping[str, tuple[str, Callable[[Array], Array], str]] = {
    "mismatch": ("difference", np.abs, "largest difference between learner and engine, of tokens that the trained weights sampled"),
    "difference": ("difference", np.abs, "largest difference between learner and engine, of tokens of any age"),
    "ratio": ("ratio", lambda values: np.abs(values - 1.0), "ratio of the updated policy to the one before, farthest from 1"),
    "weight": ("weight", lambda values: np.abs(values - 1.0), "weight by the off-policy correction, farthest from 1"),
    "loss": ("loss", np.abs, "largest share of the loss"),
    "entropy": ("entropy", lambda values: values, "highest entropy"),
    "advantage": ("advantage", np.abs, "largest advantage"),
    "logprob": ("logprob", lambda values: -values, "least likely when sampled"),
}
"""Figure that tokens can be ordered by -> its field, how far a value stands out, and words."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A token that stands out: how far, and where it is among the trained tokens of its trajectory."""

    far: float
    trajectory: str
    place: int


def token_answer(run: RunReader, step: int, by: str = "mismatch", limit: int = 30) -> dict[str, Any]:
    """Return the tokens of a step that stand out most in a figure.

    Raises:
        ConfigError: If there is no such figure.
    """
    if by not in BY:
        raise ConfigError("by", by, "is not a figure of tokens", f"Choose {', '.join(BY)}.")
    field, far, description = BY[by]
    best: list[_Found] = []
    episodes = looked = 0
    for annotation, sampled in _annotated(run, step, with_sampled=field in ("difference", "logprob")):
        values = _values(annotation, sampled, field)
        if values is None:
            continue
        episodes, looked = episodes + 1, looked + len(values)
        # A value that is not known must not stand out; what is infinite is left out below.
        distances = np.nan_to_num(far(values.astype(np.float64)), nan=-np.inf)
        if by == "mismatch" and sampled is not None:
            distances[sampled.versions != step - 1] = -np.inf
        places = np.argsort(-distances, kind="stable")[:limit]
        best += [_Found(float(distances[place]), annotation.trajectory_id, int(place)) for place in places if np.isfinite(distances[place])]
        best = sorted(best, key=lambda found: -found.far)[:limit]
    return {"by": by, "description": description, "episodes": episodes, "tokens": looked, "rows": _rows(run, best, field)}


@dataclass(frozen=True, slots=True, eq=False)
class _Sampled:
    """Log-probability and version of each trained token, as the engine gave them. # [A] each."""

    logprobs: Array
    versions: Array


def _annotated(run: RunReader, step: int, *, with_sampled: bool) -> Iterator[tuple[Annotation, _Sampled | None]]:
    """The annotations of a step, each with what the engine said if that is asked for."""
    places = run.store.query("SELECT start, bytes FROM annotations WHERE step = ?", (step,))
    found = {item.trajectory_id: item for line in run.store.lines("annotations", places) if (item := read_annotation(line)) is not None}
    for name, annotation in found.items():
        sampled = None
        if with_sampled:
            (record,) = _record(run, name) or ({},)
            turns = [turn for turn in record.get("turns", ()) if not turn.get("masked")]
            lists = [[value for turn in turns for value in turn[part]] for part in ("logprobs", "versions")]
            sampled = _Sampled(np.array(lists[0], np.float64), np.array(lists[1], np.int64))
        yield annotation, sampled


def _record(run: RunReader, trajectory: str) -> list[dict[str, Any]]:
    places = run.store.query("SELECT start, bytes FROM episodes WHERE name = ? ORDER BY attempt DESC, id DESC LIMIT 1", (trajectory,))
    return run.store.lines("episodes", places)


def _values(annotation: Annotation, sampled: _Sampled | None, field: str) -> Array | None:
    if sampled is None:
        return annotation.figures.get(field)
    if len(sampled.logprobs) != len(annotation.masks):
        return None
    if field == "logprob":
        return sampled.logprobs
    learner = annotation.figures.get("logprob")
    return None if learner is None else learner - sampled.logprobs


def _rows(run: RunReader, best: list[_Found], field: str) -> list[dict[str, Any]]:
    """The tokens with their figures and the text around them."""
    views: dict[str, list[dict[str, Any]]] = {}
    rows = []
    for found in best:
        if found.trajectory not in views:
            records = _record(run, found.trajectory)
            views[found.trajectory] = turn_views(parts_of(run, records), run.texts)[0] if records else []
        place = found.place
        for view in views[found.trajectory]:
            if view["masked"] or view["unanswered"]:
                continue
            if place < len(view["tokens"]["ids"]):
                rows.append(_row(view, place, field) | {"trajectory": found.trajectory, **_names(run, found.trajectory)})
                break
            place -= len(view["tokens"]["ids"])
    return rows


def _names(run: RunReader, trajectory: str) -> dict[str, Any]:
    [(episode, group), *_] = run.store.query('SELECT episode, "group" FROM episodes WHERE name = ?', (trajectory,))
    return {"episode": episode, "group": group}


def _row(view: Mapping[str, Any], token: int, field: str) -> dict[str, Any]:
    tokens = view["tokens"]
    count = len(tokens["ids"])
    pieces = tokens["pieces"] or [f"[{number}]" for number in tokens["ids"]]
    names = ("logprob", "learner", "difference", "advantage", "ratio", "entropy", "weight", "loss", "version", "staleness", "mask")
    return {
        "turn": view["turn"],
        "token": token,
        "value": every_value(tokens[field], count)[token],
        "text": pieces[token],
        "before": "".join(pieces[max(0, token - NEAR) : token]),
        "after": "".join(pieces[token + 1 : token + 1 + NEAR]),
        **{name: every_value(tokens[name], count)[token] for name in names},
    }
