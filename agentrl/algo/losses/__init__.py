"""Losses of the policy: from action tokens to a loss for each of them.

Each loss is a file: its options, its function with its facts above it, its formula and source; an example to copy for one's own.
Throughout, ``r = exp(clamp(new - old, +-20))``, ``p = exp(new)``, ``q = exp(old)``, and ``low`` and ``high`` are ``eps_clip_low`` and
``eps_clip_high``, whose defaults are those of the loss. Correction weights and aggregation come
afterwards and are the same for all of them. torch is imported when a loss is computed, so that a configuration can be checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from agentrl.algo import facts
from agentrl.algo.facts import LossFacts
from agentrl.algo.losses import cispo, covariance, dppo, gmpo, gspo, ipo, ppo, reinforce, sapo
from agentrl.algo.statistics import fraction, record_extremes, record_means
from agentrl.algo.token_losses import LossInputs, LossResult, PolicyLoss, TokenLosses
from agentrl.core.metrics import MetricSums

if TYPE_CHECKING:
    from torch import Tensor

POLICY_LOSSES: Mapping[str, PolicyLoss] = MappingProxyType(
    {
        "ppo": ppo.ppo,
        "gspo": gspo.gspo,
        "cispo": cispo.cispo,
        "reinforce": reinforce.reinforce,
        "dppo_tv": dppo.dppo_tv,
        "dppo_kl": dppo.dppo_kl,
        "ipo": ipo.ipo,
        "sapo": sapo.sapo,
        "gmpo": gmpo.gmpo,
        "clip_cov": covariance.clip_cov,
        "kl_cov": covariance.kl_cov,
    }
)
"""The built-in losses by name."""


def find_loss(name: str) -> PolicyLoss:
    """Return the loss that ``--policy-loss`` names; a name or a file that cannot be used is a `ConfigError`."""
    return facts.find(facts.LOSS, name, POLICY_LOSSES)


def loss_facts(name: str) -> LossFacts:
    """Return the facts of the loss that ``--policy-loss`` names; see `find_loss`."""
    found: LossFacts = facts.facts_of(find_loss(name))
    return found


def select_tokens(loss: PolicyLoss, inputs: LossInputs, options: Any) -> Tensor | None:
    """Return the tokens that a loss wants selected of the whole batch, for `LossInputs.selected`; `None` if it wants none. # [A] bool.

    Args:
        loss: The loss.
        inputs: All action tokens of the batch, `new` being the log-probabilities of the weights before the step.
        options: Its options.

    Raises:
        PluginError: If a user's function raised an exception, or returned something else than one truth value per token.
    """
    import torch

    stated: LossFacts = facts.facts_of(loss)
    if stated.selects is None:
        return None
    with torch.no_grad(), facts.calls(facts.LOSS, stated.selects):
        selected = stated.selects(inputs, options)
    if not isinstance(selected, torch.Tensor) or selected.shape != inputs.new.shape or selected.dtype != torch.bool:
        problem = "returned something else than a tensor of one truth value per action token"
        raise facts.unusable(facts.LOSS, stated.selects, problem, "Return a bool tensor like inputs.new.")
    return selected


def compute_policy_loss(loss: str | PolicyLoss, inputs: LossInputs, options: Any) -> LossResult:
    """Run a policy loss, given itself or by name, on a micro-batch.

    Args:
        loss: The loss.
        inputs: The micro-batch.
        options: Of the class among the facts of the loss.

    Returns:
        The loss per action token, with ``policy/kl`` (k3 of new against old), ``policy/ratio_mean``, ``policy/ratio_max``,
        ``policy/ratio_min``, ``policy/clip_fraction`` and the same with ``_positive`` and ``_negative`` over the tokens whose advantage
        has that sign, and with the metrics of the loss.

    Raises:
        ConfigError: If the name is unknown.
        PluginError: If a user's loss raised an exception, or returned something unusable.
    """
    function = find_loss(loss) if isinstance(loss, str) else loss
    with facts.calls(facts.LOSS, function):
        returned = function(inputs, options)
    losses = returned if isinstance(returned, TokenLosses) else TokenLosses(per_token=returned)
    _check_tokens(function, losses, inputs)
    stats = _statistics(inputs, losses)
    for name, values in losses.metrics.items():
        if f"policy/{name}" in stats.sums:
            raise facts.unusable(facts.LOSS, function, f"returned a metric {name!r}, which every loss has", "Give it another name.")
        total = values.sum()
        record_means(stats, {f"policy/{name}": (total, total.new_tensor(values.numel()))})
    ratio = inputs.ratio() if losses.ratio is None else losses.ratio
    return LossResult(per_token=losses.per_token, stats=stats, ratio=ratio.detach(), clipped=losses.clipped)


def _check_tokens(function: PolicyLoss, losses: TokenLosses, inputs: LossInputs) -> None:
    """Check that there is one number per action token, with a gradient."""
    import torch

    shape = tuple(inputs.new.shape)
    parts: dict[str, Any] = {"per_token": losses.per_token, "ratio": losses.ratio, "clipped": losses.clipped}
    for name, value in parts.items():
        if value is None and name != "per_token":
            continue
        if not isinstance(value, torch.Tensor) or value.shape != shape:
            what = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"of type {type(value).__name__}"
            remedy = f"Return a tensor of {shape[0]} numbers, one per action token."
            raise facts.unusable(facts.LOSS, function, f"returned {name} {what}", remedy)
    if not all(isinstance(values, torch.Tensor) for values in losses.metrics.values()):
        raise facts.unusable(facts.LOSS, function, "returned a metric that is no tensor", "Return tensors, one number per token.")
    if inputs.new.requires_grad and not losses.per_token.requires_grad:
        raise facts.unusable(facts.LOSS, function, "returned a loss without a gradient", "Compute it from inputs.new, not detached.")


def _statistics(inputs: LossInputs, losses: TokenLosses) -> MetricSums:
    import torch

    stats = MetricSums()
    with torch.no_grad():
        ratio = inputs.ratio() if losses.ratio is None else losses.ratio
        clipped = torch.zeros_like(ratio, dtype=torch.bool) if losses.clipped is None else losses.clipped
        log_ratio = (inputs.new - inputs.old).clamp(-20.0, 20.0)
        every = torch.ones_like(clipped)
        record_means(
            stats,
            {
                "policy/kl": ((log_ratio.expm1() - log_ratio).sum(), every.sum()),
                "policy/ratio_mean": (ratio.sum(), every.sum()),
                "policy/clip_fraction": fraction(clipped, every),
                "policy/clip_fraction_positive": fraction(clipped, inputs.advantages > 0),
                "policy/clip_fraction_negative": fraction(clipped, inputs.advantages < 0),
            },
        )
        record_extremes(stats, highs={"policy/ratio_max": ratio}, lows={"policy/ratio_min": ratio})
    return stats
