"""A few rows of a run with the losses of their tokens, before the first step and after the last, in ``rows.jsonl`` for the viewer.

A line is either a row, with its tokens and those of them that are trained, or its figures at a step. A sequence is a text that the model
reads: one of a chat, two of a pair.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback

from agentrl.core.annotations import pack
from agentrl.core.files import complete_file
from agentrl.core.types import floats
from agentrl.track.jsonl import encode, read_lines
from agentrl.track.sinks import ROWS
from agentrl.tune.directory import RunDirectory
from agentrl.tune.objectives import Batch, Measured, labelled, score
from agentrl.tune.prepare import Prepared
from agentrl.tune.row_table import Drawn, Row
from agentrl.tune.row_text import IGNORED
from agentrl.tune.trainer import MethodTrainer

MAX_TOKENS = 16_384
"""Tokens of the recorded rows together; the first row is recorded whatever its length."""
TRAINING, HELD_OUT = "training", "held out"
"""Parts of the data that a row may be of."""


@dataclass(slots=True)
class Sequences:
    """The figures of the sequences of a micro-batch, each of its labelled tokens and of the whole.

    Attributes:
        tokens: Name of a figure -> its values at the labelled tokens of each sequence.
        rewards: Reward of each sequence; none for methods without rewards.
        losses: Loss of each row; for a loss of tokens the mean over those of the row.
    """

    tokens: dict[str, list[list[float]]] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def sequences_of(row: Row) -> list[tuple[str, list[int], list[Any]]]:
    """Return the name, tokens and labels of each sequence of a row, in the order in which a `Collator` takes them."""
    if "input_ids" in row:
        return [("", row["input_ids"], row["labels"])]
    names = ("chosen", "rejected") if "chosen_ids" in row else ("completion",)
    prompt = row["prompt_ids"]
    return [(name, prompt + row[f"{name}_ids"], [IGNORED] * len(prompt) + row[f"{name}_ids"]) for name in names]


def unpacked(row: Row) -> Iterator[Row]:
    """Yield the rows that were put together into one."""
    begin = 0
    for length in row.get("seq_lengths", ()):
        yield {name: row[name][begin : begin + length] for name in ("input_ids", "labels")}
        begin += length
    if "seq_lengths" not in row:
        yield row


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
    return itertools.islice((each for row in rows for each in unpacked(row)), count)


def figures(measured: Measured, logprobs: Tensor | None, batch: Batch) -> Sequences:
    """Return the figures of a micro-batch by sequence.

    Args:
        measured: Losses and metrics by the method's objective.
        logprobs: Log-probability of each labelled token # [n]; `None` for a model that predicts no tokens.
        batch: The micro-batch.
    """
    sizes = labelled(batch).sum(dim=1).tolist()
    of_rows = "margin" in batch or "desirable" in batch
    found = Sequences(rewards=_rewards(measured, batch))
    if logprobs is not None:
        found.tokens["logprob"] = _split(logprobs, sizes)
    if of_rows:
        found.losses = measured.losses.float().tolist()
    else:
        found.tokens["loss"] = _split(measured.losses, sizes)
        found.losses = [sum(losses) / max(len(losses), 1) for losses in found.tokens["loss"]]
    return found


def _split(values: Tensor, sizes: Sequence[int]) -> list[list[float]]:
    return [part.tolist() for part in torch.split(values.float(), list(sizes))]


def _rewards(measured: Measured, batch: Batch) -> list[float]:
    metrics = measured.metrics
    if "desirable" in batch:  # KTO tells good answers from the others
        rewards, good = torch.zeros(len(batch["desirable"])), batch["desirable"].cpu()
        rewards[good], rewards[~good] = (metrics[f"reward/{name}"].float().cpu() for name in ("chosen", "rejected"))
        return rewards.tolist()
    if "reward/mean" in metrics:
        return metrics["reward/mean"].float().tolist()
    both = [metrics[f"reward/{name}"].float().tolist() for name in ("chosen", "rejected") if f"reward/{name}" in metrics]
    return [reward for rewards in both for reward in rewards]


class RowRecorder(TrainerCallback):  # type: ignore[misc]
    """Records rows with their figures when training begins, and the figures again when it ends; every rank computes, the first writes.

    Args:
        trainer: The trainer of the run.
        rows: The rows, each with the name of its part.
        directory: Directory of the run; of one that goes on, the figures up to there stay.
    """

    def __init__(self, trainer: MethodTrainer, rows: Sequence[tuple[str, Row]], directory: RunDirectory) -> None:
        self._trainer, self._rows, self._directory = trainer, rows, directory

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Write the rows and their first figures; a run that goes on has them."""
        path, step = self._directory.path / ROWS, self._directory.step
        lines = [line for line in read_lines(path) if line.get("step", 0) <= step] if step and path.is_file() else []
        if not lines:
            lines = [*self._lines(), *self._measured(step)]
        if state.is_world_process_zero:
            with complete_file(path) as partial:
                partial.write_text("".join(encode(line) + "\n" for line in lines), encoding="ascii")

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Append the last figures."""
        lines = self._measured(state.global_step) if state.global_step > self._directory.step else []
        if state.is_world_process_zero:
            with (self._directory.path / ROWS).open("a", encoding="ascii") as file:
                file.writelines(encode(line) + "\n" for line in lines)

    def _lines(self) -> list[dict[str, Any]]:
        return [_line(number, part, row) for number, (part, row) in enumerate(self._rows)]

    def _measured(self, step: int) -> list[dict[str, Any]]:
        """Return the figures of all rows, computed as in an evaluation; dropout is off."""
        trainer, lines = self._trainer, list[dict[str, Any]]()
        size, training = trainer.args.per_device_eval_batch_size, trainer.model.training
        trainer.model.eval()
        try:
            for begin in range(0, len(self._rows), size):
                rows = [row for _, row in self._rows[begin : begin + size]]
                lines += [{"row": begin + place, "step": step, **line} for place, line in enumerate(_figures_of(trainer, rows))]
        finally:
            trainer.model.train(training)
        return lines


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


def _figures_of(trainer: MethodTrainer, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the loss of each row, and the figures of its sequences."""
    batch = trainer._prepare_inputs(trainer.data_collator(rows))
    with torch.no_grad(), trainer.compute_loss_context_manager():
        measured = trainer.measure(batch)
        logprobs = score(trainer.model, batch).logprobs if trainer.model.can_generate() else None
    found, per_row = figures(measured, logprobs, batch), len(sequences_of(rows[0]))
    lines = []
    for number in range(len(rows)):
        places = range(number, len(rows) * per_row, len(rows))  # all first sequences of a batch come before the second ones
        sequences = [
            {
                **{name: pack(floats(np.array(values[place], np.float32))) for name, values in found.tokens.items()},
                **({"reward": found.rewards[place]} if found.rewards else {}),
            }
            for place in places
        ]
        lines.append({"loss": found.losses[number], "sequences": sequences})
    return lines


def rows_to_record(prepared: Prepared, order: Sequence[int], count: int) -> list[tuple[str, Row]]:
    """Return the rows of a run to record, of those that are drawn in an order and of those that are held out."""
    return chosen_rows(Drawn(prepared.parts, list(dict.fromkeys(order))), prepared.held_out, count)
