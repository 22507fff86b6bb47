"""Trainers that TRL does not have, or keeps as an experiment with another way to make tokens: ORPO, and process reward models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Trainer

from agentrl.tune.losses import odds_ratio, step_cross_entropy
from agentrl.tune.trainers import Figures, Prepared


class PlainTrainer(Prepared, Figures, Trainer):  # type: ignore[misc]
    """A trainer of transformers' whose loss is all that it adds."""

    loss_is_scaled_for_ga: bool | None = False

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.can_return_loss = True
        self.label_names: list[str] = []

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Return the loss of a batch of the evaluation."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, inputs), None, None


class OddsRatioTrainer(PlainTrainer):
    """ORPO: the likelihood of the chosen answer, and the odds ratio of the two (Hong et al., arXiv:2403.07691, Eq. 6).

    The likelihood is that of the answer given the prompt, as in the paper; TRL's counts the tokens of the prompt too.
    """

    beta = 0.1

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """Return the mean loss of the pairs of a micro-batch."""
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False).logits
        sums, counts = answer_logprobs(logits, inputs["input_ids"], inputs["completion_mask"])
        chosen, rejected = (sums / counts).chunk(2)
        ratio, log_odds = odds_ratio(chosen, rejected)
        likelihood = -sums.chunk(2)[0].sum() / counts.chunk(2)[0].sum()
        self._add("rewards/chosen", self.beta * chosen)
        self._add("rewards/rejected", self.beta * rejected)
        self._add("rewards/accuracies", (chosen > rejected).float())
        self._add("rewards/margins", self.beta * (chosen - rejected))
        self._add("nll", likelihood[None])
        self._add("log_odds", log_odds)
        return likelihood + self.beta * ratio.mean()


def answer_logprobs(logits: Tensor, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed log-probability of each row's answer, and its number of tokens.

    Args:
        logits: Of the model. # [B, L, V]
        ids: Token ids. # [B, L]
        mask: 1 at tokens of answers. # [B, L]

    Returns:
        Sums and counts. # [B], [B]
    """
    kept = mask[:, 1:].bool()
    logprobs = functional.log_softmax(logits[:, :-1].float(), dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (logprobs * kept).sum(dim=1), kept.sum(dim=1).clamp(min=1)


class ProcessRewardTrainer(PlainTrainer):
    """A process reward model: a classifier of the last token of each step (Lightman et al., arXiv:2305.20050)."""

    loss_is_scaled_for_ga: bool | None = True

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.model_accepts_loss_kwargs = True  # so that the steps of a whole batch are counted

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """Return the cross-entropy summed over the labelled steps of the micro-batch, as its share of the step's mean."""
        labels = inputs["labels"]
        judged = labels >= 0
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False).logits[judged]
        truth = labels[judged].float()
        losses = step_cross_entropy(logits, truth)
        if not self.model.training:
            self._add("loss", losses)
        self._add("accuracy", ((logits[:, 1] > logits[:, 0]) == (truth > 0.5)).float())
        self._add("good", truth)
        if num_items_in_batch is None:
            return losses.sum() / judged.sum().clamp(min=1)
        return losses.sum() / num_items_in_batch * self.accelerator.num_processes


class StepCollator:
    """Pads rows of token ids and float labels at their end."""

    def __init__(self, pad_token_id: int) -> None:
        self._pad = pad_token_id

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Return a batch. # [B, L] each."""
        length = max(len(row["input_ids"]) for row in rows)

        def padded(name: str, filler: float, dtype: torch.dtype) -> Tensor:
            return torch.tensor([list(row[name]) + [filler] * (length - len(row[name])) for row in rows], dtype=dtype)

        mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows])
        return {
            "input_ids": padded("input_ids", self._pad, torch.long),
            "attention_mask": mask,
            "labels": padded("labels", -100, torch.float32),
        }
