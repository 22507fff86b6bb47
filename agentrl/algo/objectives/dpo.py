"""DPO and its kin: pairs of answers, against a reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Lt

from agentrl.algo.facts import objective
from agentrl.algo.row_losses import RowLosses, RowScores, StepRows, pairs, preference_metrics
from agentrl.core.settings import Positive

if TYPE_CHECKING:
    from torch import Tensor

DpoLoss: TypeAlias = (
    Literal["sigmoid", "cdpo", "ipo", "ipo_sum", "hinge", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard"]
    | Literal["aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm"]
)
SORTED = ("aot", "aot_unpaired")
"""Losses that compare the pairs of a step by rank, so that the policy is run on the step before its update."""


@dataclass(frozen=True, kw_only=True)
class DpoOptions:
    """Options of `dpo`."""

    loss: DpoLoss = "sigmoid"
    """Loss of a pair. ``cdpo`` assumes that a share ``--label-smoothing`` of the labels is wrong; ``ipo`` takes log-ratios per token,
    ``ipo_sum`` sums them; the others are TRL's. Or a function of your own, ``file.py:name``."""
    beta: Positive = 0.1
    """Strength of the pull to the reference model; for ``ipo`` and ``ipo_sum`` the paper's tau."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """Share of labels taken for wrong, for ``cdpo``, ``robust``, ``exo_pair``, ``aot`` and ``aot_unpaired``."""


def matches(step: StepRows, options: DpoOptions) -> Mapping[str, Tensor]:
    """Return what each row is compared with by a loss that sorts, the value of the same rank among the others; else nothing. # [R].

    For ``aot`` a chosen row has the reference's difference of the same rank as the policy's; for ``aot_unpaired`` each row has the
    log-ratio of the same rank among the rows of the other side.
    """
    import torch

    if options.loss not in SORTED:
        return {}
    (chosen, rejected), (base_chosen, base_rejected) = pairs(step.sums), pairs(step.reference)
    if options.loss == "aot":
        matched = (base_chosen - base_rejected).sort().values[_ranks(chosen - rejected)]
        return {"matched": torch.stack([matched, torch.zeros_like(matched)], 1).flatten()}
    chosen, rejected = chosen - base_chosen, rejected - base_rejected
    return {"matched": torch.stack([rejected.sort().values[_ranks(chosen)], chosen.sort().values[_ranks(rejected)]], 1).flatten()}


def _ranks(values: Tensor) -> Tensor:
    """Return the rank of each value, from 0. # [B] int64."""
    return values.argsort().argsort()


@objective(unit="pair", options=DpoOptions, reference=True, prepare=matches, first_pass=lambda options: options.loss in SORTED)
def dpo(scores: RowScores, options: DpoOptions) -> RowLosses:
    """The loss of each pair by `PAIR_LOSSES`, from the log-ratios of policy to reference."""
    tensors = [scores.sums(), scores.reference, scores.lengths()]
    tensors += [scores.columns["matched"]] if "matched" in scores.columns else []
    ratios = PairRatios(*(half for each in tensors for half in pairs(each)))
    losses = PAIR_LOSSES[options.loss](ratios, options.beta, options.label_smoothing)
    logprobs = {"logprob/chosen": ratios.policy_chosen, "logprob/rejected": ratios.policy_rejected}
    rewards = options.beta * (tensors[0] - scores.reference)
    return RowLosses(losses=losses, metrics=preference_metrics(rewards) | logprobs, rewards=rewards)


def logsigmoid(values: Tensor) -> Tensor:
    """Return ``log sigmoid`` of each value."""
    from torch.nn import functional

    return functional.logsigmoid(values)


@dataclass(frozen=True, slots=True)
class PairRatios:
    """Log-probabilities of the answers of pairs, summed over their tokens, by the policy and by its reference. # [B] each.

    `matched_chosen` and `matched_rejected` are what `matches` prepared for the rows of each pair; only for the losses that sort.
    """

    policy_chosen: Tensor
    policy_rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_length: Tensor  # tokens
    rejected_length: Tensor
    matched_chosen: Any = None
    matched_rejected: Any = None

    @property
    def chosen(self) -> Tensor:
        """Log-ratios of policy to reference of the chosen answers."""
        return self.policy_chosen - self.reference_chosen

    @property
    def rejected(self) -> Tensor:
        """Log-ratios of policy to reference of the rejected answers."""
        return self.policy_rejected - self.reference_rejected

    @property
    def difference(self) -> Tensor:
        """Log-ratios of the chosen answers less those of the rejected ones."""
        return self.chosen - self.rejected

    @property
    def difference_per_token(self) -> Tensor:
        """The same of log-ratios that are means over tokens."""
        return self.chosen / self.chosen_length - self.rejected / self.rejected_length


def smoothed_loss(difference: Tensor, label_smoothing: float) -> Tensor:
    """Return ``-(1 - e) log sigmoid(d) - e log sigmoid(-d)``, the cross-entropy of labels of which a share e is wrong. # [B]."""
    return -(1 - label_smoothing) * logsigmoid(difference) - label_smoothing * logsigmoid(-difference)


def exo(difference: Tensor, label_smoothing: float) -> Tensor:
    """Return the EXO loss (Ji et al., arXiv:2402.00856, Eq. 16): KL(q || p) with q = softmax of the rewards, p = (1 - e, e). # [B]."""
    chosen, rejected = logsigmoid(difference), logsigmoid(-difference)
    return chosen.exp() * (chosen - math.log1p(-label_smoothing)) + rejected.exp() * (rejected - math.log(label_smoothing))


def discovered_preference(difference: Tensor) -> Tensor:
    """Return the loss DiscoPOP (Lu et al., arXiv:2406.08414, Eq. 5), a mixture of the logistic and the exponential loss. # [B]."""
    mixing = (difference / DISCOVERED_TEMPERATURE).sigmoid()
    return -logsigmoid(difference) * (1 - mixing) + (-difference).exp() * mixing


DISCOVERED_TEMPERATURE = 0.05
"""Temperature of the mixture in `discovered_preference`, the paper's tau."""


def unpaired(ratios: PairRatios, beta: float, label_smoothing: float) -> Tensor:
    """Return a share for each pair of the smoothed loss of chosen and rejected log-ratios of equal rank. # [B].

    Each comparison is made from both sides, whose other side is a number of the first pass: both rows may be in other micro-batches. The
    mean over the step is that of the comparisons, and its gradient theirs: each side gives the gradient of its own row.
    """
    sides = smoothed_loss(beta * (ratios.chosen - ratios.matched_chosen), label_smoothing)
    sides = sides + smoothed_loss(beta * (ratios.matched_rejected - ratios.rejected), label_smoothing)
    return sides - 0.5 * sides.detach()


PairLoss: TypeAlias = "Callable[[PairRatios, float, float], Tensor]"
"""From log-ratios, beta and the share of wrong labels to the loss of each pair. # [B]."""

PAIR_LOSSES: Mapping[str, PairLoss] = {
    # Rafailov et al., arXiv:2305.18290, Eq. 7
    "sigmoid": lambda r, beta, e: -logsigmoid(beta * r.difference),
    # Mitchell, A note on DPO with noisy preferences, 2023, Eq. 3
    "cdpo": lambda r, beta, e: smoothed_loss(beta * r.difference, e),
    # Azar et al., arXiv:2310.12036, Eq. 17; with means over tokens, as in TRL, the scale does not grow with the length of answers
    "ipo": lambda r, beta, e: (r.difference_per_token - 1 / (2 * beta)) ** 2,
    # the same equation as written, as in OpenRLHF
    "ipo_sum": lambda r, beta, e: (r.difference - 1 / (2 * beta)) ** 2,
    # Zhao et al., arXiv:2305.10425, with log-ratios as the scores
    "hinge": lambda r, beta, e: (1 - beta * r.difference).relu(),
    # Chowdhury et al., arXiv:2403.00409, Eq. 12
    "robust": lambda r, beta, e: (-(1 - e) * logsigmoid(beta * r.difference) + e * logsigmoid(-beta * r.difference)) / (1 - 2 * e),
    "exo_pair": lambda r, beta, e: exo(beta * r.difference, e),
    # Chen et al., arXiv:2402.05369
    "nca_pair": lambda r, beta, e: -logsigmoid(beta * r.chosen) - 0.5 * logsigmoid(-beta * r.chosen) - 0.5 * logsigmoid(-beta * r.rejected),
    # Jung et al., arXiv:2404.04656, without the moving mean
    "bco_pair": lambda r, beta, e: -logsigmoid(beta * r.chosen) - logsigmoid(-beta * r.rejected),
    # Wu et al., arXiv:2405.00675, Eq. 4.7 with probabilities 1 and 0
    "sppo_hard": lambda r, beta, e: (r.chosen - 0.5 / beta) ** 2 + (r.rejected + 0.5 / beta) ** 2,
    # Melnyk et al., arXiv:2406.05882: quantiles of the step are compared, not pairs
    "aot": lambda r, beta, e: smoothed_loss(beta * (r.policy_chosen - r.policy_rejected - r.matched_chosen), e),
    "aot_unpaired": lambda r, beta, e: unpaired(r, beta, e),
    # D'Oosterlinck et al., arXiv:2408.06266, Eqs. 7 and 8
    "apo_zero": lambda r, beta, e: 1 - (beta * r.chosen).sigmoid() + (beta * r.rejected).sigmoid(),
    "apo_down": lambda r, beta, e: (beta * r.chosen).sigmoid() + 1 - (beta * r.difference).sigmoid(),
    "discopop": lambda r, beta, e: discovered_preference(beta * r.difference),
    # as `sigmoid`, with means over tokens
    "sigmoid_norm": lambda r, beta, e: -logsigmoid(beta * r.difference_per_token),
}
"""Name in ``agentrl dpo --loss`` -> loss of a pair."""
