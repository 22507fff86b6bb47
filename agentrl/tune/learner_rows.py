"""Rows of a data set as the learner takes them, the settings of the learner for a run, and the figures of a few rows for the viewer.

These have the losses of their tokens, before the first step and after the last, in ``rows.jsonl``. A line is either a row, with its tokens
and those of them that are trained, or its figures at a step. A sequence is a text that the model reads: one of a chat, two of a pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from agentrl.algo.facts import facts_of
from agentrl.algo.objectives import OBJECTIVES
from agentrl.algo.plan import AlgoConfig
from agentrl.assets import model_path
from agentrl.core.annotations import pack
from agentrl.core.files import write_text
from agentrl.core.images import locate
from agentrl.core.model_shape import text_part, trained_positions
from agentrl.core.plugins import is_plugin
from agentrl.core.types import floats, ints
from agentrl.learner.row_objective import LabelledRows, RowFigures
from agentrl.learner.rows import TokenRow
from agentrl.learner.settings import LearnerSettings, ObjectiveSettings
from agentrl.learner.state import LearnerState
from agentrl.resolve.tune import TunePlan
from agentrl.rollout.images import ImageReader
from agentrl.track.jsonl import encode, read_lines
from agentrl.track.sinks import ROWS
from agentrl.tune.directory import RunDirectory
from agentrl.tune.row_table import Row
from agentrl.tune.row_text import IGNORED

MAX_TOKENS = 16_384
"""Tokens of the recorded rows together; the first row is recorded whatever its length."""
TRAINING, HELD_OUT = "training", "held out"
"""Parts of the data that a row may be of."""


class RowMaker:
    """Makes rows for the learner of rows of a data set.

    Args:
        command: The method.
        reader: Of the images of rows; `None` for a model that reads text only.
    """

    def __init__(self, command: str, reader: ImageReader | None = None) -> None:
        self._reader = reader
        facts = facts_of(OBJECTIVES[command])
        self._paired, self._judged = facts.unit == "pair", facts.reads == "head"

    def __call__(self, rows: Sequence[Row]) -> LabelledRows:
        """Return the rows of a step, those of pairs one behind the other; of labelled answers with a mismatched one for each."""
        if "input_ids" in rows[0]:
            return self._given(rows)
        if self._paired:
            answers = [(row, row[name]) for row in rows for name in ("chosen_ids", "rejected_ids")]
            margins = torch.tensor([row.get("margin", 0.0) for row, _ in answers])
            return self._answers(answers, columns={"margin": margins}, paired=True)
        # An answer to another prompt for each, from which a divergence is estimated.
        mismatched = [(row, rows[place - 1]["completion_ids"]) for place, row in enumerate(rows)]
        desirable = torch.tensor([row["label"] for row in rows])
        companions = self._answers(mismatched)
        return self._answers([(row, row["completion_ids"]) for row in rows], columns={"desirable": desirable}, companions=companions)

    def _given(self, rows: Sequence[Row]) -> LabelledRows:
        """Rows with a label for each token: the token itself, or a judgement of the step that it ends."""
        labels = [np.asarray(row["labels"][1:]) for row in rows]
        places = [np.flatnonzero(each != IGNORED) for each in labels]
        read = [(row, row["input_ids"], reads + self._judged) for row, reads in zip(rows, places, strict=True) if len(reads)]
        if not self._judged:
            return self._rows(read)
        found = np.concatenate([each[reads] for each, reads in zip(labels, places, strict=True)])
        return self._rows(read, labels=torch.from_numpy(found.astype(np.float32)))

    def _answers(self, answers: Sequence[tuple[Row, list[int]]], **rest: Any) -> LabelledRows:
        made = []
        for row, answer in answers:
            ids = row["prompt_ids"] + answer
            # Nothing predicts the first token of a row.
            reads = [len(ids) - 1] if self._judged else range(max(0, len(row["prompt_ids"]) - 1), len(ids) - 1)
            made.append((row, ids, np.asarray(reads)))
        return self._rows(made, **rest)

    def _rows(self, sequences: Sequence[tuple[Row, list[int], Any]], **rest: Any) -> LabelledRows:
        rows = tuple(
            TokenRow(tokens=ints(ids), reads=ints(reads), images=tuple(locate(ids, self._images(row)))) for row, ids, reads in sequences
        )
        counts = torch.tensor([len(row.reads) for row in rows])
        return LabelledRows(
            rows=rows,
            row_lengths=torch.tensor([len(row.tokens) for row in rows]),
            row_actions=counts,
            row=torch.arange(len(rows)).repeat_interleave(counts),
            **rest,
        )

    def _images(self, row: Row) -> Any:
        names = row.get("images", ())
        return self._reader.read_here(names) if self._reader is not None and names else ()


def learner_settings(plan: TunePlan, steps: int) -> LearnerSettings:
    """Return the settings of the learner for a run of so many steps."""
    settings, own = plan.settings, plan.settings.method
    model = model_path(settings.model.model)
    config = AutoConfig.from_pretrained(model, trust_remote_code=settings.model.trust_remote_code)
    # A mixture of experts says how much it is to be balanced.
    text = text_part(config)
    balance = text.get("router_aux_loss_coef") if text.get("num_experts_per_tok") else 0.0
    objective = ObjectiveSettings(
        name=own.loss if is_plugin(own.loss) else plan.method.command,
        options=asdict(own) if is_plugin(own.loss) else own,
        reference=getattr(own, "reference", ""),
        teacher=getattr(own, "teacher", ""),
        # Pairs share prompts, for which a packed kernel computes all pairs of tokens of a micro-batch on a CPU.
        packs=plan.method.form in ("dialogue", "steps"),
        task=plan.method.task,
    )
    return LearnerSettings(
        model=model,
        learner=plan.learner,
        algo=AlgoConfig(aux_loss_coef=float(balance or 0.0)),
        num_steps=steps,
        max_new_tokens=0,
        objective=objective,
        lora=settings.lora,
        # Positions are those of the model's training, unless rows may be longer.
        max_model_len=max(trained_positions(config), settings.data.max_length),
        seed=settings.run.seed,
        trust_remote_code=settings.model.trust_remote_code,
        device=plan.ranks.device,
    )


def sequences_of(row: Row) -> list[tuple[str, list[int], list[Any]]]:
    """Return the name, tokens and labels of each sequence of a row, in their order."""
    if "input_ids" in row:
        return [("", row["input_ids"], row["labels"])]
    names = ("chosen", "rejected") if "chosen_ids" in row else ("completion",)
    prompt = row["prompt_ids"]
    return [(name, prompt + row[f"{name}_ids"], [IGNORED] * len(prompt) + row[f"{name}_ids"]) for name in names]


def chosen_rows(drawn: Sequence[Row], held_out: Sequence[Row], count: int) -> list[tuple[str, Row]]:
    """Return at most `count` rows with the names of their parts: half of them held out, where there are such, and the first ones drawn."""
    held = [(HELD_OUT, row) for row in held_out[: count // 2]]
    trained = [(TRAINING, row) for row in drawn[: count - len(held)]]
    found, left = list[tuple[str, Row]](), MAX_TOKENS
    for part, row in (*trained, *held):
        left -= sum(len(ids) for _, ids, _ in sequences_of(row))
        if left >= 0 or not found:
            found.append((part, row))
    return found


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
            write_text(self._directory.path / ROWS, "".join(encode(line) + "\n" for line in self._lines))

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
