"""TRL's trainers with our rows, checkpoints and losses; the only module that imports trl.

What every trainer here has in common is `Prepared`: its rows come as token ids in the order in which they are drawn, and checkpoints are
complete under their name or not there.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer
from trl import DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer
from trl.models.utils import prepare_deepspeed

from agentrl.core.files import remove_directory, write_manifest
from agentrl.tune.directory import PREFIX, checkpoints_in
from agentrl.tune.losses import conservative_dpo, generalized_jsd, identity_preference


class Prepared:
    """Mixed into a trainer: rows are token ids already, checkpoints have a manifest, and nothing is sent to anyone."""

    keep_checkpoints = 2
    before_save: Callable[[], None] = staticmethod(lambda: None)

    def _prepare_dataset(self, dataset: Any, *rest: Any, **named: Any) -> Any:
        return dataset

    def _send_telemetry(self) -> None:
        """Send nothing."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint with its manifest; only then remove older ones."""
        self.before_save()
        folder = Path(self.args.output_dir)  # type: ignore[attr-defined]
        target = folder / f"{PREFIX}{self.state.global_step}"  # type: ignore[attr-defined]
        first = self.is_world_process_zero()  # type: ignore[attr-defined]
        if first and target.exists():
            shutil.rmtree(target)
        self.accelerator.wait_for_everyone()  # type: ignore[attr-defined]
        Trainer._save_checkpoint(self, model, trial)
        self.accelerator.wait_for_everyone()  # type: ignore[attr-defined]
        if first:
            write_manifest(target)
            complete = [path for path in checkpoints_in(folder) if path != target]
            for path in complete[: max(0, len(complete) + 1 - self.keep_checkpoints)]:
                remove_directory(path)


class Figures:
    """Mixed into a trainer: means of figures over all rows of a step or an evaluation, whatever micro-batches and ranks they are in."""

    def _add(self, name: str, values: Tensor) -> None:
        """Add the values of the rows of a micro-batch, which are gathered from all ranks; ``loss`` takes the place of the trainer's own."""
        self._add_sum(name, values.detach().float().sum(), values.numel())

    def _add_sum(self, name: str, total: Tensor, count: int | Tensor) -> None:
        """Add a sum over so many rows or tokens."""
        pair = torch.stack([total.detach().float(), torch.as_tensor(count, device=total.device).float()])
        both = self.accelerator.gather(pair[None]).sum(0).tolist()  # type: ignore[attr-defined]
        sums = self.__dict__.setdefault("_sums", {}).setdefault(self.model.training, defaultdict(lambda: [0.0, 0.0]))  # type: ignore[attr-defined]
        sums[name] = [before + more for before, more in zip(sums[name], both, strict=True)]

    def _count_rows(self, count: int) -> None:
        """Note the rows of a micro-batch, by which TRL's own figures of it are weighed; a smaller last one counts less."""
        training = self.model.training  # type: ignore[attr-defined]
        self.__dict__.setdefault("_rows", {}).setdefault(training, []).append(count)

    def _weigh(self, figures: dict[str, list[float]], training: bool) -> None:
        """Put the mean over rows in the place of TRL's figures of micro-batches."""
        rows = self.__dict__.setdefault("_rows", {}).pop(training, [])
        for name, values in figures.items():
            if len(values) == len(rows):
                figures[name] = [sum(value * count for value, count in zip(values, rows, strict=True)) / sum(rows)]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the figures of the step, or of the evaluation, too."""
        training = self.model.training  # type: ignore[attr-defined]
        if hasattr(self, "_metrics"):
            self._weigh(self._metrics["train" if training else "eval"], training)
        sums = self.__dict__.setdefault("_sums", {}).pop(training, {})
        prefix = "" if training else "eval_"
        found = {f"{prefix}{name}": total / count for name, (total, count) in sums.items() if count}
        super().log({**logs, **found}, start_time)  # type: ignore[misc]


class SupervisedTrainer(Prepared, Figures, SFTTrainer):  # type: ignore[misc]
    """Supervised fine-tuning on rows of token ids and labels; the loss of an evaluation is the mean over all of its tokens."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """Return TRL's loss of a micro-batch."""
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not self.model.training and not return_outputs:
            tokens = (inputs["labels"][:, 1:] != -100).sum()
            self._add_sum("loss", loss * tokens, tokens)
        return loss


class PairRewardTrainer(Prepared, Figures, RewardTrainer):  # type: ignore[misc]
    """Training of a reward model on pairs of token ids."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """Return TRL's loss of a micro-batch."""
        self._count_rows(len(inputs["input_ids"]))
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _prepare_dataset(self, dataset: Any, *rest: Any, **named: Any) -> Any:
        """Put the prompt before each answer, since the model reads both."""

        def joined(row: dict[str, Any]) -> dict[str, Any]:
            return {name: row["prompt_ids"] + row[name] for name in ("chosen_ids", "rejected_ids")}

        return dataset if "prompt_ids" not in dataset.column_names else dataset.map(joined, remove_columns="prompt_ids")


class PreferenceTrainer(Prepared, Figures, DPOTrainer):  # type: ignore[misc]
    """DPO and its kin; `own_loss` names one that TRL does not have.

    TRL's ``sigmoid`` takes no notice of its ``label_smoothing``, and its ``ipo`` is the one per token.
    """

    own_loss = ""

    def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
        if not self.own_loss:
            self._count_rows(len(inputs["input_ids"]))
            return super()._compute_loss(model, inputs, return_outputs)
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        fed = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "use_cache": False}
        sums = model(**fed, labels=labels, fused_lm_head=True).log_probs.sum(dim=1)
        policy = sums.chunk(2)  # the chosen answers come first
        reference = self.compute_ref_log_probs(self.ref_model if self.ref_model is not None else self.model, inputs)
        chosen, rejected = (mine - theirs for mine, theirs in zip(policy, reference, strict=True))
        if self.own_loss == "cdpo":
            losses = conservative_dpo(chosen, rejected, beta=self.beta, label_smoothing=self.args.label_smoothing)
        else:
            losses = identity_preference(chosen, rejected, beta=self.beta)
        self._add("rewards/chosen", self.beta * chosen)
        self._add("rewards/rejected", self.beta * rejected)
        self._add("rewards/accuracies", (chosen > rejected).float())
        self._add("rewards/margins", self.beta * (chosen - rejected))
        self._add("logps/chosen", policy[0])
        self._add("logps/rejected", policy[1])
        return losses.mean()


class LabelledTrainer(Prepared, KTOTrainer):  # type: ignore[misc]
    """KTO on labelled answers of token ids."""

    def _prepare_dataset(self, dataset: Any, *rest: Any, **named: Any) -> Any:
        """Give each row the answer of the row before it in its micro-batch, from which KTO estimates a divergence."""
        size = self.args.per_device_train_batch_size if hasattr(self, "args") else rest[1].per_device_train_batch_size

        def shifted(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
            answers = batch["completion_ids"]
            return {"KL_completion_ids": [answers[-1], *answers[:-1]]}

        return dataset.map(shifted, batched=True, batch_size=size)


class DistillTrainer(Prepared, Figures, SFTTrainer):  # type: ignore[misc]
    """Distillation of a teacher on data: the divergence at each trained token."""

    def __init__(self, *args: Any, teacher: str, beta: float, temperature: float, **named: Any) -> None:
        super().__init__(*args, **named)
        self.beta, self.temperature = beta, temperature
        loaded = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32, trust_remote_code=self.args.trust_remote_code)
        if self.is_deepspeed_enabled:
            self.teacher = prepare_deepspeed(loaded, self.accelerator)
        else:
            self.teacher = self.accelerator.prepare_model(loaded, evaluation_mode=True)
        self.teacher.eval()

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """Return the divergence summed over the trained tokens of the micro-batch, as its share of the step's mean."""
        trained = inputs["labels"][:, 1:] != -100
        fed = {name: value for name, value in inputs.items() if name != "labels"} | {"use_cache": False}
        mine = model(**fed).logits[:, :-1][trained]
        with torch.no_grad():
            theirs = self.teacher(**fed).logits[:, :-1][trained]
        divergence = generalized_jsd(mine, theirs, beta=self.beta, temperature=self.temperature)
        if not self.model.training:
            self._add("loss", divergence)
        self._add("kl", generalized_jsd(mine.detach(), theirs, beta=0.0))
        self._add("agreement", (mine.argmax(-1) == theirs.argmax(-1)).float())
        if num_items_in_batch is None:
            return divergence.sum() / trained.sum().clamp(min=1)
        return divergence.sum() / num_items_in_batch * self.accelerator.num_processes

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Return the loss of a batch of the evaluation."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, inputs), None, None
