"""What each method trains: the losses and metrics that a model gives on a micro-batch.

A loss belongs to a row or to a token; `agentrl.tune.trainer` takes their mean over a step, whatever micro-batches and ranks they are in.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from accelerate.utils import extract_model_from_parallel, reduce
from peft import PeftModel
from torch import Tensor
from torch.nn import functional

from agentrl.learner.head import only_positions, scores_in_chunks
from agentrl.tune.encode import IGNORED
from agentrl.tune.losses import PAIR_LOSSES, PairRatios, bradley_terry, generalized_jsd, kahneman_tversky, odds_ratio, step_cross_entropy

Batch: TypeAlias = Mapping[str, Any]
"""What `agentrl.tune.trainer.Collator` makes of rows."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The losses and metrics of a micro-batch.

    Attributes:
        losses: Loss of each row or token. # [n]
        metrics: Values of rows or tokens by the name of their metric, which is their mean.
        balance: Load-balancing loss of a mixture of experts, with its weight; `None` for other models.
    """

    losses: Tensor
    metrics: Mapping[str, Tensor]
    balance: Tensor | None = None


class Objective:
    """The objective of a method.

    Args:
        settings: Section of the method.
        frozen: Reference model or teacher; `None` if there is none, or if the reference is the model without its adapter.
    """

    def __init__(self, settings: Any, frozen: Any = None) -> None:
        self.settings, self.frozen = settings, frozen

    def count(self, batch: Batch) -> int:
        """Return the number of losses of a micro-batch."""
        return int(labelled(batch).sum())

    def measure(self, model: Any, batch: Batch) -> Measured:
        """Return the losses and metrics of a micro-batch, by the model in training."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of the labelled tokens of a micro-batch: log-probabilities, entropies, and which tokens are the likeliest. # [n] each."""

    mask: Tensor  # the predicted tokens that are labelled # [B, L - 1]
    logprobs: Tensor
    entropies: Tensor
    correct: Tensor
    balance: Tensor | None

    def row_sums(self) -> Tensor:
        """Return the log-probability of each row's answer. # [B]."""
        return torch.zeros_like(self.mask, dtype=self.logprobs.dtype).masked_scatter(self.mask, self.logprobs).sum(dim=1)

    def lengths(self) -> Tensor:
        """Return the number of labelled tokens of each row. # [B]."""
        return self.mask.sum(dim=1)


def labelled(batch: Batch) -> Tensor:
    """Return which tokens, the first of each row left out, are labelled. # [B, L - 1] bool."""
    return batch["labels"][:, 1:] != IGNORED  # type: ignore[no-any-return]


def inputs_of(batch: Batch) -> dict[str, Any]:
    """Return the arguments of a model for a batch."""
    return {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch} | {"use_cache": False}


def label_logits(model: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Return the logits that predict labelled tokens # [n, V], and in training the weighted load-balancing loss of a mixture of experts."""
    plain = extract_model_from_parallel(model)
    coefficient = getattr(plain.config.get_text_config(), "router_aux_loss_coef", None)
    balanced = bool(coefficient) and torch.is_grad_enabled()
    select = functional.pad(labelled(batch), (0, 1)).flatten().nonzero()[:, 0]
    with only_positions(plain.get_output_embeddings(), select):
        output = model(**inputs_of(batch), **({"output_router_logits": True} if balanced else {}))
    return output.logits[0], coefficient * output.aux_loss if balanced else None


def score(model: Any, batch: Batch) -> Scores:
    """Return the scores of a micro-batch's labelled tokens by a model."""
    logits, balance = label_logits(model, batch)
    mask = labelled(batch)
    targets = batch["labels"][:, 1:][mask]
    logprobs, entropies = scores_in_chunks(logits, targets, torch.ones_like(targets, dtype=torch.float32), entropy_gradient=False)
    return Scores(mask, logprobs, entropies, logits.argmax(dim=-1) == targets, balance)


class Supervised(Objective):
    """Negative log-likelihood of labelled tokens; ``dft`` weighs each by its probability (arXiv:2508.05629)."""

    def measure(self, model: Any, batch: Batch) -> Measured:
        """Return a loss for each labelled token."""
        scores = score(model, batch)
        losses = -scores.logprobs
        if self.settings.loss == "dft":
            losses = losses * scores.logprobs.detach().exp()
        return Measured(losses, {"token_accuracy": scores.correct, "entropy": scores.entropies}, scores.balance)


class Distillation(Objective):
    """Divergence of a teacher's distribution at labelled tokens."""

    def measure(self, model: Any, batch: Batch) -> Measured:
        """Return a loss for each labelled token."""
        mine, balance = label_logits(model, batch)
        with torch.no_grad():
            theirs, _ = label_logits(self.frozen, batch)
        losses = generalized_jsd(mine, theirs, beta=self.settings.beta, temperature=self.settings.temperature)
        forward = generalized_jsd(mine.detach(), theirs, beta=0.0)
        return Measured(losses, {"kl": forward, "agreement": mine.argmax(-1) == theirs.argmax(-1)}, balance)


class StepLabels(Objective):
    """A process reward model: a classifier of the last token of each step (Lightman et al., arXiv:2305.20050)."""

    def measure(self, model: Any, batch: Batch) -> Measured:
        """Return a loss for each labelled step."""
        mask = labelled(batch)
        logits, labels = model(**inputs_of(batch)).logits[:, 1:][mask], batch["labels"][:, 1:][mask]
        correct = (logits[:, 1] > logits[:, 0]) == (labels > 0.5)
        return Measured(step_cross_entropy(logits, labels), {"accuracy": correct, "label/mean": labels})


class PerRow(Objective):
    """An objective with one loss for each row of the data."""

    def count(self, batch: Batch) -> int:
        """Return the number of rows; the sequences of a pair are chosen answers, then rejected ones."""
        return len(batch["input_ids"]) // (1 if "desirable" in batch else 2)


class BradleyTerry(PerRow):
    """A reward model of pairs."""

    def measure(self, model: Any, batch: Batch) -> Measured:
        """Return a loss for each pair."""
        rewards = model(**inputs_of(batch)).logits[:, 0].float()
        chosen, rejected = rewards.chunk(2)
        losses = bradley_terry(chosen, rejected, margin=batch["margin"], centring=self.settings.center_rewards_coefficient)
        return Measured(losses, {"accuracy": chosen > rejected, "margin": chosen - rejected, "reward/mean": rewards})


class Referenced(PerRow):
    """An objective that compares the model with a reference."""

    def ratios(self, model: Any, batch: Batch) -> tuple[Scores, Tensor]:
        """Return the model's scores, and the log-probability of each row's answer by the reference. # [B]."""
        return score(model, batch), self.reference_sums(model, batch)

    @torch.no_grad()
    def reference_sums(self, model: Any, batch: Batch) -> Tensor:
        """Return the log-probability of each row's answer by the reference. # [B]."""
        plain = extract_model_from_parallel(model)
        with plain.disable_adapter() if self.frozen is None and isinstance(plain, PeftModel) else nullcontext():
            return score(model if self.frozen is None else self.frozen, batch).row_sums()


class DirectPreference(Referenced):
    """DPO and its kin: losses of the log-ratios of a pair's answers."""

    def measure(self, model: Any, batch: Batch) -> Measured:
        """Return a loss for each pair."""
        scores, reference = self.ratios(model, batch)
        sums = scores.row_sums()
        ratios = PairRatios(*sums.chunk(2), *reference.chunk(2), *scores.lengths().chunk(2))
        losses = PAIR_LOSSES[self.settings.loss](ratios, self.settings.beta, self.settings.label_smoothing)
        metrics = preference_metrics(self.settings.beta * ratios.chosen, self.settings.beta * ratios.rejected)
        return Measured(
            losses, {**metrics, "logprob/chosen": ratios.policy_chosen, "logprob/rejected": ratios.policy_rejected}, scores.balance
        )


class OddsRatio(PerRow):
    """ORPO: the likelihood of the chosen answer, and the odds ratio of the two (Hong et al., arXiv:2403.07691, Eq. 6).

    The likelihood is that of the answer given the prompt, as in the paper; TRL's counts the tokens of the prompt too.
    """

    def measure(self, model: Any, batch: Batch) -> Measured:
        """Return a loss for each pair."""
        scores = score(model, batch)
        sums, counts = scores.row_sums(), scores.lengths()
        chosen, rejected = (sums / counts).chunk(2)
        ratio, log_odds = odds_ratio(chosen, rejected)
        likelihood = -sums.chunk(2)[0].sum() / counts.chunk(2)[0].sum()
        metrics = preference_metrics(self.settings.beta * chosen, self.settings.beta * rejected)
        return Measured(likelihood + self.settings.beta * ratio, {**metrics, "nll": likelihood[None], "log_odds": log_odds}, scores.balance)


class KahnemanTversky(Referenced):
    """KTO: losses of labelled answers, against the divergence that mismatched answers of the micro-batch estimate."""

    def measure(self, model: Any, batch: Batch) -> Measured:
        """Return a loss for each answer."""
        mismatched = batch["mismatched"]
        with torch.no_grad():
            divergence = (score(model, mismatched).row_sums() - self.reference_sums(model, mismatched)).mean()
        divergence = reduce(divergence, "mean").clamp(min=0)
        scores, reference = self.ratios(model, batch)
        own, sums, good = self.settings, scores.row_sums(), batch["desirable"]
        ratios = sums - reference
        weights = {"desirable_weight": own.desirable_weight, "undesirable_weight": own.undesirable_weight}
        losses = kahneman_tversky(ratios, good, divergence, beta=own.beta, **weights)
        rewards = own.beta * ratios
        metrics = {"reward/chosen": rewards[good], "reward/rejected": rewards[~good], "kl": divergence[None]}
        return Measured(losses, {**metrics, "logprob/chosen": sums[good], "logprob/rejected": sums[~good]}, scores.balance)


def preference_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Return the metrics of the implicit rewards of pairs."""
    return {"reward/chosen": chosen, "reward/rejected": rejected, "accuracy": chosen > rejected}


OBJECTIVES: Mapping[str, type[Objective]] = {
    "sft": Supervised,
    "reward-model": BradleyTerry,
    "process-reward-model": StepLabels,
    "dpo": DirectPreference,
    "kto": KahnemanTversky,
    "orpo": OddsRatio,
    "distill": Distillation,
}
"""Command -> objective of its method."""
