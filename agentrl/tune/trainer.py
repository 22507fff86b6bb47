"""The trainer of all methods: transformers' own, whose loss and metrics are those of an objective of `agentrl.tune.objectives`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer

from agentrl.core.images import image_arguments, locate
from agentrl.rollout.images import ImageReader
from agentrl.tune.objectives import Batch, Measured, count_losses
from agentrl.tune.row_table import Row
from agentrl.tune.row_text import IGNORED


class MethodTrainer(Trainer):  # type: ignore[misc]
    """A trainer whose loss is the mean of an objective's over the rows or tokens of a step, or of an evaluation."""

    # The loss is a share of that of the step already; transformers must not divide it by the number of micro-batches.
    loss_is_scaled_for_ga: bool | None = True
    optimizer: Any

    def __init__(
        self, *, objective: Callable[[Any, Batch], Measured], optimizer: Callable[[Any], torch.optim.Optimizer] | None = None, **named: Any
    ) -> None:
        super().__init__(**named)
        self._make_optimizer = optimizer
        self.model_accepts_loss_kwargs = True  # `compute_loss` wants the number of losses in the step
        self._objective = objective
        self._in_training = True  # and not in an evaluation; the modules of a model may compute alike in both
        self._sums: dict[bool, dict[str, Tensor]] = {True: {}, False: {}}  # in training or not: metric -> sum and count # [2]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Return the optimizer that the constructor was given a maker of, else that of the arguments."""
        if self.optimizer is None and self._make_optimizer is not None:
            self.optimizer = self._make_optimizer(self.model if model is None else model)
        made: torch.optim.Optimizer = super().create_optimizer(model)
        return made

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Return the micro-batches of a step, and the number of their losses on all ranks."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        count = torch.tensor(sum(map(count_losses, batches)), device=device)
        return batches, self.accelerator.reduce(count)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """Return the share of a micro-batch in the loss of its step; its own mean where the step is not known."""
        measured = self._objective(model, inputs)
        losses = measured.losses
        self._add(measured.metrics if self._in_training else {**measured.metrics, "loss": losses})
        if num_items_in_batch is None:
            loss, steps = losses.mean(), 1
        else:  # gradients are averaged over ranks
            loss, steps = losses.sum() * self.accelerator.num_processes / num_items_in_batch, self.args.gradient_accumulation_steps
        return loss if measured.balance is None else loss + measured.balance / steps

    def measure(self, inputs: Any) -> Measured:
        """Return the losses and metrics of a micro-batch, which count for no metric of a step."""
        return self._objective(self.model, inputs)

    def evaluate(self, *args: Any, **named: Any) -> dict[str, float]:
        """Evaluate, and log the metrics as those of an evaluation."""
        self._in_training = False
        try:
            found: dict[str, float] = super().evaluate(*args, **named)
        finally:
            self._in_training = True
        return found

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Return the loss of a batch of the evaluation."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, inputs), None, None

    def _add(self, metrics: Mapping[str, Tensor]) -> None:
        """Add the values of a micro-batch's rows or tokens on all ranks to the sums of their metrics."""
        floats = [values.detach().float() for values in metrics.values()]
        # One reduction for all metrics, because each waits for every rank.
        own = torch.stack([torch.stack([values.sum(), values.new_tensor(values.numel())]) for values in floats])
        sums = self._sums[self._in_training]
        for name, pair in zip(metrics, self.accelerator.reduce(own).double().cpu(), strict=True):
            sums[name] = sums[name] + pair if name in sums else pair

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the metrics of the step or of the evaluation, too; an evaluation's loss is the mean over all of its rows or tokens."""
        training = self._in_training
        sums, self._sums[training] = self._sums[training], {}
        metrics = {name: (total / count).item() for name, (total, count) in sums.items() if count}
        if "reward/chosen" in metrics and "reward/rejected" in metrics:
            metrics["margin"] = metrics["reward/chosen"] - metrics["reward/rejected"]
        super().log({**logs, **{f"{'' if training else 'eval_'}{name}": value for name, value in metrics.items()}}, start_time)


class Collator:
    """Makes batches of rows: sequences of token ids and labels, padded at their end.

    The sequences of pairs are all chosen answers with their prompts, then all rejected ones. A labelled answer comes a second time behind
    the next row's prompt, from which KTO estimates a divergence. Packed rows are one sequence, in which positions start again.

    Args:
        pad_token_id: Token that fills rows.
        reader: Of the images of rows; `None` for a model that reads text only.
    """

    def __init__(self, pad_token_id: int, reader: ImageReader | None = None) -> None:
        self._pad, self._reader = pad_token_id, reader

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return a batch."""
        if "seq_lengths" in rows[0]:
            return _joined(rows)
        if "input_ids" in rows[0]:
            ids = [row["input_ids"] for row in rows]
            return self._padded(ids, [row["labels"] for row in rows]) | self._pixels(rows, ids)
        if "chosen_ids" in rows[0]:
            answers = [row[name] for name in ("chosen_ids", "rejected_ids") for row in rows]
            return self._answers([*rows, *rows], answers) | {"margin": torch.tensor([row.get("margin", 0.0) for row in rows])}
        answers = [row["completion_ids"] for row in rows]
        mismatched = self._answers(rows, [answers[-1], *answers[:-1]])
        return self._answers(rows, answers) | {"desirable": torch.tensor([row["label"] for row in rows]), "mismatched": mismatched}

    def _pixels(self, rows: Sequence[Row], ids: Sequence[list[int]]) -> dict[str, Any]:
        """Return what the model is given of the images of rows, which are processed anew: those of a data set would fill the memory."""
        names = [row.get("images", ()) for row in rows]
        if self._reader is None or not any(names):
            return {}
        placed = [locate(tokens, self._reader.read_here(own)) for tokens, own in zip(ids, names, strict=True)]
        arrays = image_arguments(max(map(len, ids)), placed)
        return {"pixels": {name: torch.from_numpy(array) for name, array in arrays.items()}}

    def _answers(self, rows: Sequence[Row], answers: Sequence[list[int]]) -> dict[str, Any]:
        prompts = [row["prompt_ids"] for row in rows]
        ids = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        labels = [[IGNORED] * len(prompt) + answer for prompt, answer in zip(prompts, answers, strict=True)]
        return self._padded(ids, labels) | self._pixels(rows, ids)

    def _padded(self, ids: Sequence[list[int]], labels: Sequence[list[Any]]) -> dict[str, Any]:
        """Return sequences as tensors. # [B, L] each."""
        contents = {"input_ids": (ids, self._pad), "attention_mask": ([[1] * len(row) for row in ids], 0), "labels": (labels, IGNORED)}
        return {name: pad_sequence([torch.tensor(row) for row in rows], True, filler) for name, (rows, filler) in contents.items()}


def _joined(rows: Sequence[Row]) -> dict[str, Any]:
    """Return packed rows as one sequence without padding; no token predicts the first of the next row. # [1, L] each."""
    batch = {name: torch.tensor([[token for row in rows for token in row[name]]]) for name in ("input_ids", "labels")}
    position = torch.cat([torch.arange(length) for row in rows for length in row["seq_lengths"]])[None]
    return {"input_ids": batch["input_ids"], "labels": batch["labels"].masked_fill(position == 0, IGNORED), "position_ids": position}
