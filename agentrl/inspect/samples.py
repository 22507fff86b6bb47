"""The recorded rows of supervised or preference training: what is trained of each, and what the model made of it before and after."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from agentrl.core.annotations import as_plain, unpack
from agentrl.core.errors import ConfigError
from agentrl.inspect.reader import RunReader
from agentrl.inspect.tokens import every_value
from agentrl.track.sinks import ROWS

Line: TypeAlias = Mapping[str, Any]

WHEN = ("before", "after")
FIELDS = (*(f"{name}_{when}" for name in ("loss", "logprob") for when in (*WHEN, "change")), "label")
"""Figures of a token: those before and after training, and their difference."""
MASKS = {"trained": "trained", "context": "not trained: it is a part of the prompt, or of what the loss leaves out"}
MAX_TEXT = 160


def num_samples(run: RunReader) -> int:
    """Return how many rows are recorded."""
    return len(_read(run)[0])


def sample_list(run: RunReader) -> dict[str, Any]:
    """Return the recorded rows, each with its beginning, what is trained of it, and its figures."""
    rows, figures = _read(run)
    return {"rows": [_summary(run, row, figures.get(row["row"], [])) for row in rows.values()], "steps": _steps(figures)}


def sample_answer(run: RunReader, number: int) -> dict[str, Any]:
    """Return a recorded row with every token, in the form of an episode whose turns are its sequences.

    Raises:
        ConfigError: If there is no such row.
    """
    rows, figures = _read(run)
    if number not in rows:
        remedy = "The commands for given data record up to --record-rows of their rows."
        raise ConfigError("ROW", str(number), "is not among the recorded rows", remedy)
    row, measured, numbers = rows[number], figures.get(number, []), list(rows)
    views = [_view(run, place, sequence, measured) for place, sequence in enumerate(row["sequences"])]
    at = numbers.index(number)
    values = _ranges(views)
    return {
        **_about(row, measured),
        "steps": _steps(figures),
        "turns": views,
        "fields": [name for name in FIELDS if name in values],
        "ranges": values,
        "masks": MASKS,
        "previous": numbers[at - 1] if at else None,
        "next": numbers[at + 1] if at + 1 < len(numbers) else None,
        "has_tokenizer": run.texts.tokenizer is not None,
    }


def _read(run: RunReader) -> tuple[dict[int, Line], dict[int, list[Line]]]:
    """Return the rows, and the figures of each in the order of their steps; malformed lines are left out."""
    rows, figures = dict[int, Line](), dict[int, list[Line]]()
    for line in run.directory.rows_of(ROWS):
        if isinstance(line.get("row"), int) and isinstance(line.get("sequences"), list):
            if "step" in line:
                figures.setdefault(line["row"], []).append(line)
            else:
                rows[line["row"]] = line
    return rows, {number: sorted(lines, key=lambda line: line["step"]) for number, lines in figures.items()}


def _steps(figures: Mapping[int, Sequence[Line]]) -> list[int]:
    """Return the steps of the first and the last figures; one of them while the run goes on."""
    return sorted({lines[place]["step"] for lines in figures.values() for place in (0, -1)})


def _pair(measured: Sequence[Line]) -> tuple[Line | None, Line | None]:
    """Return the first and the last figures of a row; the last are `None` while there are only the first."""
    return (measured[0] if measured else None, measured[-1] if len(measured) > 1 else None)


def _about(row: Line, measured: Sequence[Line]) -> dict[str, Any]:
    return {
        **{name: row.get(name) for name in ("row", "part", "label", "margin")},
        "images": row.get("images", 0),
        **{f"loss_{when}": None if line is None else line.get("loss") for when, line in zip(WHEN, _pair(measured), strict=True)},
    }


def _summary(run: RunReader, row: Line, measured: Sequence[Line]) -> dict[str, Any]:
    sequences = row["sequences"]
    first = sequences[0]
    trained = set(first.get("trained", ()))
    begin = min(trained, default=len(first["ids"]))
    return {
        **_about(row, measured),
        "tokens": sum(len(sequence["ids"]) for sequence in sequences),
        "trained": sum(len(sequence.get("trained", ())) for sequence in sequences),
        "prompt": _text(run, first["ids"][:begin])[-MAX_TEXT:],
        "answers": [{"name": each.get("name", ""), "text": _answer(run, each)[:MAX_TEXT]} for each in sequences],
        "rewards": [_rewards(place, measured) for place in range(len(sequences))],
    }


def _answer(run: RunReader, sequence: Line) -> str:
    """Return what is trained of a sequence, with dots for what stands between; of judged steps the labels."""
    if labels := sequence.get("labels"):
        return "steps: " + " ".join(f"{label:g}" for label in labels)
    parts: list[list[int]] = []
    # No place follows -2 directly, so the first trained token begins a part.
    for before, place in itertools.pairwise([-2, *sequence.get("trained", ())]):
        if place != before + 1:
            parts.append([])
        parts[-1] += sequence["ids"][place : place + 1]
    return " … ".join(_text(run, part) for part in parts)


def _text(run: RunReader, ids: Sequence[int]) -> str:
    pieces = run.texts.pieces(ids)
    return "".join(pieces) if pieces is not None else " ".join(f"[{token}]" for token in ids)


def _rewards(place: int, measured: Sequence[Line]) -> dict[str, float | None]:
    """Return the reward of a sequence before and after; `None` where there is none."""
    found = [None if line is None else line["sequences"][place].get("reward") for line in _pair(measured)]
    return dict(zip(WHEN, found, strict=True))


def _view(run: RunReader, place: int, sequence: Line, measured: Sequence[Line]) -> dict[str, Any]:
    """Return a sequence as a turn whose tokens are all of it."""
    ids, trained = sequence["ids"], [index for index in sequence.get("trained", ()) if index < len(sequence["ids"])]
    values: dict[str, Any] = dict.fromkeys(FIELDS)
    for name in ("loss", "logprob"):
        pair = _pair(measured)
        found = [None if line is None else unpack(line["sequences"][place].get(name), len(trained)) for line in pair]
        for when, numbers in zip(WHEN, found, strict=True):
            values[f"{name}_{when}"] = None if numbers is None else _placed(numbers, trained, len(ids))
        if found[0] is not None and found[1] is not None:
            values[f"{name}_change"] = _placed(found[1] - found[0], trained, len(ids))
    if labels := sequence.get("labels"):
        values["label"] = _placed(labels, trained, len(ids))
    masks = ["context"] * len(ids)
    for index in trained:
        masks[index] = "trained"
    tokens = {"ids": ids, "pieces": run.texts.pieces(ids), "mask": masks, **values}
    return {
        "turn": place,
        "name": sequence.get("name", ""),
        "trained": len(trained),
        "rewards": _rewards(place, measured),
        "tokens": tokens,
    }


def _placed(values: Any, places: Sequence[int], size: int) -> list[float | None]:
    """Return the values of some tokens at their places in the whole."""
    plain = every_value(as_plain(values), len(places))
    found: list[float | None] = [None] * size
    for place, value in zip(places, plain, strict=False):
        found[place] = value
    return found


def _ranges(views: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the least and the largest value of each figure that some token has; the same for a figure before and after."""
    values = {name: [value for view in views for value in view["tokens"][name] or () if value is not None] for name in FIELDS}
    found = {name: [min(each), max(each)] for name, each in values.items() if each and all(map(math.isfinite, each))}
    for name in ("loss", "logprob"):
        both = [found[f"{name}_{when}"] for when in WHEN if f"{name}_{when}" in found]
        shared = [min(low for low, _ in both), max(high for _, high in both)] if both else []
        found |= {f"{name}_{when}": shared for when in WHEN if f"{name}_{when}" in found}
    return found
