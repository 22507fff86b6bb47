"""Objectives of the methods: the losses and metrics that a model gives on a micro-batch.

A loss belongs to a row or to a token; `agentrl.tune.trainer` takes their mean over a step, whatever micro-batches and ranks they are in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from accelerate.utils import extract_model_from_parallel, reduce
from peft import PeftModel
from torch import Tensor
from torch.nn import functional

from agentrl.learner.head import only_positions, scores_in_chunks
from agentrl.tune.losses import PAIR_LOSSES, PairRatios, bradley_terry, generalized_jsd, kahneman_tversky, odds_ratio, step_cross_entropy
from agentrl.tune.row_text import IGNORED

Batch: TypeAlias = Mapping[str, Any]
"""Tensors that `agentrl.tune.trainer.Collator` makes of rows."""


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


Objective: TypeAlias = Callable[[Any, Any, Any, Batch], Measured]
"""Makes losses and metrics of the method's own settings, its frozen model, the model in training, and a micro-batch.

The frozen model is a teacher or a reference; `None` where there is none, or where the reference is the model without its adapter.
"""


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
    given = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
    return {**given, **batch.get("pixels", {}), "use_cache": False}


def label_logits(model: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Return the logits that predict labelled tokens # [n, V], and in training the weighted load-balancing loss of a mixture of experts."""
    plain = extract_model_from_parallel(model)
    coefficient = getattr(plain.config.get_text_config(), "router_aux_loss_coef", None)
    balanced = bool(coefficient) and torch.is_grad_enabled()
    # A label is predicted at the place before it, and nothing is at the last place.
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


def count_losses(batch: Batch) -> int:
    """Return the number of losses of a micro-batch: its pairs or answers, or else its labelled tokens."""
    per_row = next((batch[name] for name in ("margin", "desirable") if name in batch), None)
    return int(labelled(batch).sum()) if per_row is None else len(per_row)


def supervised(own: Any, frozen: Any, model: Any, batch: Batch) -> Measured:
    """Return the negative log-likelihood of labelled tokens; ``dft`` weighs each by its probability (arXiv:2508.05629)."""
    scores = score(model, batch)
    losses = -scores.logprobs
    if own.loss == "dft":
        losses = losses * scores.logprobs.detach().exp()
    return Measured(losses, {"token_accuracy": scores.correct, "entropy": scores.entropies}, scores.balance)


def distillation(own: Any, frozen: Any, model: Any, batch: Batch) -> Measured:
    """Return the divergence of the teacher's distribution at labelled tokens."""
    mine, balance = label_logits(model, batch)
    with torch.no_grad():
        theirs, _ = label_logits(frozen, batch)
    losses = generalized_jsd(mine, theirs, beta=own.beta, temperature=own.temperature)
    forward = generalized_jsd(mine.detach(), theirs, beta=0.0)
    return Measured(losses, {"kl": forward, "agreement": mine.argmax(-1) == theirs.argmax(-1)}, balance)


def step_labels(own: Any, frozen: Any, model: Any, batch: Batch) -> Measured:
    """Return the cross-entropy of labelled steps, each judged at its last token (Lightman et al., arXiv:2305.20050)."""
    mask = labelled(batch)
    logits, labels = model(**inputs_of(batch)).logits[:, 1:][mask], batch["labels"][:, 1:][mask]
    correct = (logits[:, 1] > logits[:, 0]) == (labels > 0.5)
    return Measured(step_cross_entropy(logits, labels), {"accuracy": correct, "label/mean": labels})


def reward_pairs(own: Any, frozen: Any, model: Any, batch: Batch) -> Measured:
    """Return the loss of Bradley and Terry of pairs of answers, which a reward model scores."""
    rewards = model(**inputs_of(batch)).logits[:, 0].float()
    chosen, rejected = rewards.chunk(2)
    losses = bradley_terry(chosen, rejected, margin=batch["margin"], centring=own.center_rewards_coefficient)
    return Measured(losses, {"accuracy": chosen > rejected, "margin": chosen - rejected, "reward/mean": rewards})


@torch.no_grad()
def reference_sums(frozen: Any, model: Any, batch: Batch) -> Tensor:
    """Return the log-probability of each row's answer by the reference. # [B]."""
    plain = extract_model_from_parallel(model)
    with plain.disable_adapter() if frozen is None and isinstance(plain, PeftModel) else nullcontext():
        return score(model if frozen is None else frozen, batch).row_sums()


def direct_preference(own: Any, frozen: Any, model: Any, batch: Batch) -> Measured:
    """Return the loss of DPO, or one of its kin, of pairs of answers."""
    scores = score(model, batch)
    tensors = scores.row_sums(), reference_sums(frozen, model, batch), scores.lengths()
    pairs = PairRatios(*(half for each in tensors for half in each.chunk(2)))
    losses = PAIR_LOSSES[own.loss](pairs, own.beta, own.label_smoothing)
    logprobs = {"logprob/chosen": pairs.policy_chosen, "logprob/rejected": pairs.policy_rejected}
    return Measured(losses, _preference_metrics(own.beta * pairs.chosen, own.beta * pairs.rejected) | logprobs, scores.balance)


def odds_ratio_preference(own: Any, frozen: Any, model: Any, batch: Batch) -> Measured:
    """Return ORPO's loss: the likelihood of the chosen answers, and the odds ratio of pairs (Hong et al., arXiv:2403.07691, Eq. 6).

    The likelihood is that of the answer given the prompt, as in the paper; TRL's counts the tokens of the prompt too.
    """
    scores = score(model, batch)
    sums, lengths = scores.row_sums(), scores.lengths()
    chosen, rejected = (sums / lengths).chunk(2)
    ratio, log_odds = odds_ratio(chosen, rejected)
    likelihood = -sums.chunk(2)[0].sum() / lengths.chunk(2)[0].sum()
    metrics = _preference_metrics(own.beta * chosen, own.beta * rejected) | {"nll": likelihood[None], "log_odds": log_odds}
    return Measured(likelihood + own.beta * ratio, metrics, scores.balance)


def labelled_preference(own: Any, frozen: Any, model: Any, batch: Batch) -> Measured:
    """Return KTO's loss of labelled answers, against the divergence that mismatched answers of the micro-batch estimate."""
    mismatched, good = batch["mismatched"], batch["desirable"]
    with torch.no_grad():
        divergence = (score(model, mismatched).row_sums() - reference_sums(frozen, model, mismatched)).mean()
    # One estimate for all ranks, so that the loss of a row does not depend on the rank that it is on.
    divergence = reduce(divergence, "mean").clamp(min=0)
    scores = score(model, batch)
    sums = scores.row_sums()
    ratios = sums - reference_sums(frozen, model, batch)
    weights = {"desirable_weight": own.desirable_weight, "undesirable_weight": own.undesirable_weight}
    losses = kahneman_tversky(ratios, good, divergence, beta=own.beta, **weights)
    rewards = own.beta * ratios
    metrics = {"reward/chosen": rewards[good], "reward/rejected": rewards[~good], "kl": divergence[None]}
    return Measured(losses, metrics | {"logprob/chosen": sums[good], "logprob/rejected": sums[~good]}, scores.balance)


def _preference_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Return the metrics of the implicit rewards of pairs; `agentrl.tune.trainer` adds their margin."""
    return {"reward/chosen": chosen, "reward/rejected": rejected, "accuracy": chosen > rejected}


OBJECTIVES: Mapping[str, Objective] = {
    "sft": supervised,
    "reward-model": reward_pairs,
    "process-reward-model": step_labels,
    "dpo": direct_preference,
    "kto": labelled_preference,
    "orpo": odds_ratio_preference,
    "distill": distillation,
}
"""Command -> objective of its method."""
