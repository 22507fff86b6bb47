"""ORPO: the likelihood of chosen answers, and the odds of both answers of a pair, without a reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.algo.facts import objective
from agentrl.algo.row_losses import RowLosses, RowScores, StepRows, pairs, preference_metrics
from agentrl.core.settings import Positive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class OrpoOptions:
    """Options of `orpo`."""

    beta: Positive = 0.1
    """Weight of the odds-ratio loss beside the likelihood of the chosen answer (the paper's lambda)."""


def mean_length(step: StepRows, options: OrpoOptions) -> Mapping[str, Tensor]:
    """Return the mean number of tokens of the chosen answers. # [R]."""
    chosen, _ = pairs(step.lengths)
    return {"mean_length": chosen.float().mean().expand(len(step.lengths))}


@objective(unit="pair", options=OrpoOptions, prepare=mean_length)
def orpo(scores: RowScores, options: OrpoOptions) -> RowLosses:
    """``-log p`` per token of the step's chosen answers, and `beta` times `odds_ratio` (Hong et al., arXiv:2403.07691, Eq. 6).

    The likelihood is that of the answer given the prompt, as in the paper; TRL's counts the tokens of the prompt too. It is a mean over
    the tokens of all chosen answers of the step, of which a pair has the share of its own.
    """
    sums, (mean, _) = scores.sums(), pairs(scores.columns["mean_length"])
    chosen, rejected = pairs(sums / scores.lengths())
    ratio, log_odds = odds_ratio(chosen, rejected)
    likelihood = -pairs(sums)[0] / mean
    rewards = options.beta * sums / scores.lengths()
    metrics = preference_metrics(rewards) | {"nll": likelihood, "log_odds": log_odds}
    return RowLosses(losses=likelihood + options.beta * ratio, metrics=metrics, rewards=rewards)


def odds_ratio(chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    """Return ORPO's odds-ratio loss of each pair, and the log odds ratio (Hong et al., arXiv:2403.07691, Eqs. 4 and 7).

    With p = exp(mean log-probability of a token of an answer) and odds = p / (1 - p):
    ``-log sigmoid(log odds(chosen) - log odds(rejected))``.

    Args:
        chosen: Mean log-probability per token of each preferred answer, below 0. # [B]
        rejected: The same of the other answers. # [B]

    Returns:
        Loss and log odds ratio of each pair. # [B], [B]
    """
    from torch.nn.functional import logsigmoid

    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return -logsigmoid(log_odds), log_odds


def _log1mexp(value: Tensor) -> Tensor:
    """Return log(1 - exp(value)) for values below 0, exact near 0 and far from it; 0 counts as the nearest number below."""
    import torch

    value = value.clamp(max=-torch.finfo(value.dtype).eps)
    near = value > -0.6931472
    # The branch that is not taken needs a finite gradient too: `where` multiplies it by 0, and 0 times infinity is NaN.
    return torch.where(near, torch.log(-torch.expm1(value)), torch.log1p(-torch.exp(torch.where(near, -1.0, value))))
