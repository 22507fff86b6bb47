"""Losses that hold back the few tokens that lower the entropy most (arXiv:2505.22617)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.algo.facts import policy_loss
from agentrl.algo.losses.ppo import clipped_objective
from agentrl.algo.token_losses import LossInputs, LossOptions, TokenLosses
from agentrl.core.errors import BatchError, ConfigError
from agentrl.core.settings import NonNegative, Share

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CovarianceOptions:
    """Options of both losses."""

    cov_share: Share = 2e-4
    """Share of the tokens that ``clip_cov`` and ``kl_cov`` hold back, at least one token."""


@dataclass(frozen=True, kw_only=True)
class ClipCovOptions(CovarianceOptions, LossOptions):
    """Options of `clip_cov`.

    Raises:
        ConfigError: If the range holds no covariance.
    """

    clip_cov_range: tuple[float, float] = (1.0, 5.0)
    """Covariances of log-probability and advantage between which ``clip_cov`` draws its tokens."""

    def __post_init__(self) -> None:
        low, high = self.clip_cov_range
        if low >= high:
            problem, remedy = "holds no covariance", "Give the smaller bound first, for example 1 5."
            raise ConfigError("--clip-cov-range", self.clip_cov_range, problem, remedy)


@dataclass(frozen=True, kw_only=True)
class KlCovOptions(CovarianceOptions):
    """Options of `kl_cov`."""

    kl_cov_coef: NonNegative = 1.0
    """Weight of the absolute log ratio of the tokens that ``kl_cov`` holds back."""


def covariance(inputs: LossInputs) -> Tensor:
    """Return each token's share in the covariance of log-probability and advantage: the product of their deviations. # [A] float64.

    It drives the change of entropy in a step of the policy gradient (arXiv:2505.22617).
    """
    new, advantages = inputs.new.double(), inputs.advantages.double()
    count = max(len(new), 1)
    return (new - new.sum() / count) * (advantages - advantages.sum() / count)


def high_covariance(inputs: LossInputs, options: KlCovOptions) -> Tensor:
    """Mark the ``cov_share`` of the tokens with the highest `covariance`, at least one. # [A] bool."""
    return _marked(covariance(inputs).topk(_count(inputs, options)).indices, inputs)


def random_in_covariance_range(inputs: LossInputs, options: ClipCovOptions) -> Tensor:
    """Mark ``cov_share`` of the tokens, drawn at random from those whose `covariance` lies in ``clip_cov_range``. # [A] bool."""
    import torch

    share, (low, high) = covariance(inputs), options.clip_cov_range
    candidates = ((share > low) & (share < high)).nonzero()[:, 0]
    # Drawn on the CPU and from the step's seed alone, so that the choice depends neither on the device nor on earlier draws.
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(inputs.seed)).to(candidates.device)
    return _marked(candidates[order[: _count(inputs, options)]], inputs)


@policy_loss(options=ClipCovOptions, selects=random_in_covariance_range)
def clip_cov(inputs: LossInputs, options: ClipCovOptions) -> TokenLosses:
    """`ppo`, without the tokens that `random_in_covariance_range` chose, whose gradient is 0 (arXiv:2505.22617)."""
    per_token, clipped = clipped_objective(inputs.ratio(), inputs.advantages, options)
    chosen = _chosen(inputs)
    return TokenLosses(per_token=per_token.where(~chosen, 0.0), clipped=clipped | chosen, metrics={"selected": chosen.float()})


@policy_loss(options=KlCovOptions, several_updates=True, selects=high_covariance)
def kl_cov(inputs: LossInputs, options: KlCovOptions) -> TokenLosses:
    """``-r A``, plus ``kl_cov_coef |new - old|`` for the tokens that `high_covariance` chose (arXiv:2505.22617)."""
    per_token, chosen = -inputs.ratio() * inputs.advantages, _chosen(inputs)
    penalty = options.kl_cov_coef * (inputs.new - inputs.old).abs()
    return TokenLosses(per_token=per_token + penalty.where(chosen, 0.0), metrics={"selected": chosen.float()})


def _chosen(inputs: LossInputs) -> Tensor:
    if inputs.selected is None:
        raise BatchError("the loss needs the tokens that were selected of the whole batch; see select_tokens")
    return inputs.selected


def _count(inputs: LossInputs, options: CovarianceOptions) -> int:
    return min(max(int(options.cov_share * len(inputs.new)), 1), len(inputs.new))


def _marked(places: Tensor, inputs: LossInputs) -> Tensor:
    import torch

    return torch.zeros_like(inputs.new, dtype=torch.bool).index_fill(0, places, True)
