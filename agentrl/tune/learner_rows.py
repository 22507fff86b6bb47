"""Rows of a data set as the learner takes them, and the settings of the learner for a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from agentrl.algo.facts import facts_of
from agentrl.algo.objectives import OBJECTIVES
from agentrl.algo.plan import AlgoConfig
from agentrl.assets import model_path
from agentrl.core.images import locate
from agentrl.core.model_shape import text_part, trained_positions
from agentrl.core.plugins import is_plugin
from agentrl.core.types import ints
from agentrl.learner.row_objective import LabelledRows
from agentrl.learner.rows import TokenRow
from agentrl.learner.settings import LearnerSettings, ObjectiveSettings
from agentrl.resolve.tune import TunePlan
from agentrl.rollout.images import ImageReader
from agentrl.tune.row_table import Row
from agentrl.tune.row_text import IGNORED


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
