"""A few rows of a run with the losses of their tokens, before the first step and after the last, in ``rows.jsonl`` for the viewer.

A line is either a row, with its tokens and those of them that are trained, or its figures at a step. A sequence is a text that the model
reads: one of a chat, two of a pair.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from agentrl.core.annotations import pack
from agentrl.core.files import complete_file
from agentrl.core.types import floats
from agentrl.learner.row_objective import LabelledRows, RowFigures
from agentrl.learner.state import LearnerState
from agentrl.track.jsonl import encode, read_lines
from agentrl.track.sinks import ROWS
from agentrl.tune.directory import RunDirectory
from agentrl.tune.learner_rows import RowMaker
from agentrl.tune.prepare import Prepared
from agentrl.tune.row_table import Drawn, Row
from agentrl.tune.row_text import IGNORED

MAX_TOKENS = 16_384
"""Tokens of the recorded rows together; the first row is recorded whatever its length."""
TRAINING, HELD_OUT = "training", "held out"
"""Parts of the data that a row may be of."""


def sequences_of(row: Row) -> list[tuple[str, list[int], list[Any]]]:
    """Return the name, tokens and labels of each sequence of a row, in their order."""
    if "input_ids" in row:
        return [("", row["input_ids"], row["labels"])]
    names = ("chosen", "rejected") if "chosen_ids" in row else ("completion",)
    prompt = row["prompt_ids"]
    return [(name, prompt + row[f"{name}_ids"], [IGNORED] * len(prompt) + row[f"{name}_ids"]) for name in names]


def chosen_rows(drawn: Iterable[Row], held_out: Sequence[Row], count: int) -> list[tuple[str, Row]]:
    """Return at most `count` rows with the names of their parts: half of them held out, where there are such, and the first ones drawn."""
    held = [(HELD_OUT, row) for row in _first(held_out, count // 2)]
    trained = [(TRAINING, row) for row in _first(drawn, count - len(held))]
    found, left = list[tuple[str, Row]](), MAX_TOKENS
    for part, row in (*trained, *held):
        left -= sum(len(ids) for _, ids, _ in sequences_of(row))
        if left >= 0 or not found:
            found.append((part, row))
    return found


def _first(rows: Iterable[Row], count: int) -> Iterator[Row]:
    return itertools.islice(rows, count)


class RowRecorder:
    """Records rows with their figures when training begins, and the figures again when it ends; every rank computes, the first writes.

    Args:
        state: The models of the run.
        make: Makes rows for the learner.
        rows: The rows, each with the name of its part.
        directory: Directory of the run; of one that goes on, the figures up to there stay.
        size: Rows that are measured together.
    """

    def __init__(self, state: LearnerState, make: RowMaker, rows: Sequence[tuple[str, Row]], directory: RunDirectory, size: int) -> None:
        self._state, self._make, self._rows, self._directory, self._size = state, make, rows, directory, size
        self._lines = list[dict[str, Any]]()

    def begin(self) -> None:
        """Write the rows and their first figures; a run that goes on with the same rows has them."""
        path, step = self._directory.path / ROWS, self._directory.step
        rows = [_line(number, *each) for number, each in enumerate(self._rows)]
        self._lines = [line for line in read_lines(path) if line.get("step", 0) <= step] if step and path.is_file() else []
        if self._lines[: len(rows)] != rows:
            self._lines = [*rows, *self._measured(step)]
        self._write()

    def end(self, step: int) -> None:
        """Add the last figures, unless they are there."""
        if all(line.get("step") != step for line in self._lines):
            self._lines += self._measured(step)
            self._write()

    def _write(self) -> None:
        if self._state.ranks.first:
            with complete_file(self._directory.path / ROWS) as partial:
                partial.write_text("".join(encode(line) + "\n" for line in self._lines), encoding="ascii")

    def _measured(self, step: int) -> list[dict[str, Any]]:
        """Return the figures of all rows, computed as in an evaluation."""
        lines = list[dict[str, Any]]()
        for begin in range(0, len(self._rows), self._size):
            rows = [row for _, row in self._rows[begin : begin + self._size]]
            made = self._make(rows)
            found = figures(self._state.measure_rows(step, made), made, len(sequences_of(rows[0])))
            lines += [{"row": begin + place, "step": step, **line} for place, line in enumerate(found)]
        return lines


def figures(measured: RowFigures, made: LabelledRows, per_row: int) -> Iterator[dict[str, Any]]:
    """Yield the loss of each row, which is `per_row` sequences, and the figures of its sequences."""
    sizes = made.row_actions.tolist()
    losses = measured.losses.cpu()
    tokens = {} if measured.logprobs is None else {"logprob": torch.split(measured.logprobs.cpu(), sizes)}
    if len(losses) == made.num_actions and not made.paired and measured.rewards is None:
        tokens["loss"] = torch.split(losses, sizes)
        losses = torch.tensor([float(part.mean()) if len(part) else 0.0 for part in tokens["loss"]])
    for first in range(0, made.num_rows, per_row):
        sequences = [
            {
                **{name: pack(floats(np.asarray(parts[place], np.float32))) for name, parts in tokens.items()},
                **({} if measured.rewards is None else {"reward": float(measured.rewards[place])}),
            }
            for place in range(first, first + per_row)
        ]
        yield {"loss": float(losses[first]), "sequences": sequences}


def _line(number: int, part: str, row: Row) -> dict[str, Any]:
    about: dict[str, Any] = {name: row[name] for name in ("label", "margin") if name in row}
    sequences = [sequence_line(*each) for each in sequences_of(row)]
    return {"row": number, "part": part, **about, "images": len(row.get("images", ())), "sequences": sequences}


def sequence_line(name: str, ids: list[int], labels: list[Any]) -> dict[str, Any]:
    """Return a sequence with the places of its trained tokens, and their labels where these are no tokens."""
    places = [place for place, label in enumerate(labels) if place and label != IGNORED]  # nothing predicts the first token
    values = [labels[place] for place in places]
    steps = any(isinstance(value, float) for value in values)
    return {"name": name, "ids": ids, "trained": places, **({"labels": values} if steps else {})}


def rows_to_record(prepared: Prepared, order: Sequence[int], count: int) -> list[tuple[str, Row]]:
    """Return the rows of a run to record, of those that are drawn in an order and of those that are held out."""
    return chosen_rows(Drawn(prepared.parts, list(dict.fromkeys(order))), prepared.held_out, count)
