"""Losses of the policy: from action tokens to a loss for each of them.

Each loss is one function with its facts above it, and an example to copy for one's own. Throughout, ``r = exp(clamp(new - old, +-20))``,
``p = exp(new)``, ``q = exp(old)``, and ``low`` and ``high`` are ``eps_clip_low`` and ``eps_clip_high``, whose default each loss states.
Correction weights and aggregation come afterwards and are the same for all of them. torch is imported when a loss is computed, so that a
configuration can be checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from agentrl.algo import facts
from agentrl.algo.facts import LossFacts, policy_loss
from agentrl.algo.losses import LossInputs, LossOptions, LossResult, PolicyLoss, TokenLosses
from agentrl.algo.selection import high_covariance, random_in_covariance_range
from agentrl.algo.statistics import bounded_exp, fraction, record_extremes, record_means
from agentrl.core.errors import BatchError
from agentrl.core.metrics import MetricSums

if TYPE_CHECKING:
    from torch import Tensor

RATIO_CAP = 20.0
"""Largest weight that `dppo_tv` and `dppo_kl` give a token; the paper advises a large one."""


@policy_loss(dual_clip=True)
def ppo(inputs: LossInputs, options: LossOptions) -> TokenLosses:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)``, for A < 0 and dual clip c ``-max(that min, c A)``.

    PPO (arXiv:1707.06347), clip-higher (DAPO, arXiv:2503.14476), dual clip (arXiv:1912.09729).
    """
    ratio, advantages = inputs.ratio(), inputs.advantages
    per_token, clipped = clipped_objective(ratio, advantages, options)
    if options.dual_clip is None:
        return TokenLosses(per_token=per_token, clipped=clipped)
    negative, floor = advantages < 0, -options.dual_clip * advantages
    metrics = {"dual_clip_fraction": (per_token > floor)[negative]}
    return TokenLosses(per_token=per_token.minimum(floor).where(negative, per_token), clipped=clipped, metrics=metrics)


@policy_loss
def gspo(inputs: LossInputs, options: LossOptions) -> TokenLosses:
    """PPO's clipped objective on one ratio per sequence, ``exp(mean over the sequence of (new - old))``.

    GSPO (arXiv:2507.18071), in its token form: the value of the ratio is the sequence's, its gradient the token's own.
    The gradient is that of GSPO wherever a sequence's tokens share one advantage. Meant for the aggregation
    ``seq-mean-token-mean`` and for clip ranges around 3e-4.
    """
    mean = inputs.sequence_mean((inputs.new - inputs.old).detach())
    ratio = bounded_exp(mean + inputs.new - inputs.new.detach())
    per_token, clipped = clipped_objective(ratio, inputs.advantages, options)
    return TokenLosses(per_token=per_token, ratio=ratio, clipped=clipped)


@policy_loss
def cispo(inputs: LossInputs, options: LossOptions) -> TokenLosses:
    """``-stop_gradient(clip(r, 1 - low, 1 + high)) A new``: every token keeps a gradient (CISPO, arXiv:2506.13585)."""
    ratio = inputs.ratio().detach()
    weight = ratio.clamp(1.0 - options.eps_clip_low, 1.0 + options.eps_clip_high)
    return TokenLosses(per_token=-weight * inputs.advantages * inputs.new, clipped=weight != ratio)


@policy_loss(single_update=True, clip=None)
def reinforce(inputs: LossInputs, options: LossOptions) -> Tensor:
    """``-A new``, without a ratio: for exactly on-policy batches (Williams, 1992)."""
    del options
    return -inputs.advantages * inputs.new


@policy_loss(clip=(0.15, 0.15))
def dppo_tv(inputs: LossInputs, options: LossOptions) -> TokenLosses:
    """``-stop_gradient(min(r, 20)) A new``, and 0 for a token with ``p - q > high`` and A > 0, or ``p - q < -low`` and A <= 0.

    DPPO with the binary approximation of the total variation (arXiv:2602.04879).
    """
    moved = inputs.new.detach().exp() - inputs.old.exp()
    outside = (moved > options.eps_clip_high).where(inputs.advantages > 0, moved < -options.eps_clip_low)
    return _outside_dropped(inputs, outside)


@policy_loss(clip=(0.05, 0.05))
def dppo_kl(inputs: LossInputs, options: LossOptions) -> TokenLosses:
    """As `dppo_tv`, with the KL divergence of "this token or another" as the distance, in whichever direction p moved.

    ``q log(q / p) + (1 - q) log((1 - q) / (1 - p))``, the binary approximation of the KL divergence (arXiv:2602.04879).
    """
    new, rest = inputs.new.detach(), 1e-8
    p, q = new.exp(), inputs.old.exp()
    divergence = q * (inputs.old - new) + (1.0 - q) * ((1.0 - q + rest) / (1.0 - p + rest)).log()
    above, below = (divergence > options.eps_clip_high) & (p > q), (divergence > options.eps_clip_low) & (p < q)
    return _outside_dropped(inputs, above.where(inputs.advantages > 0, below))


def _outside_dropped(inputs: LossInputs, outside: Tensor) -> TokenLosses:
    """The policy gradient weighed by the capped ratio, without the tokens that left the trust region."""
    weight = inputs.ratio().detach().clamp(max=RATIO_CAP)
    per_token = (-weight * inputs.advantages * inputs.new).where(~outside, 0.0)
    return TokenLosses(per_token=per_token, clipped=outside)


@policy_loss(clip=(0.3, 0.3), reads=("ipo_kl_coef",))
def ipo(inputs: LossInputs, options: LossOptions) -> TokenLosses:
    """``-r A`` where ``-low <= p - q <= high``, whatever the sign of A, plus ``ipo_kl_coef (new - old)^2`` for every token.

    The default of prime-rl, INTELLECT Policy Optimization; its squared term is that of Kimi K2.5 (arXiv:2602.02276).
    """
    moved = inputs.new.detach().exp() - inputs.old.exp()
    outside = (moved > options.eps_clip_high) | (moved < -options.eps_clip_low)
    per_token = (-inputs.ratio() * inputs.advantages).where(~outside, 0.0)
    if options.ipo_kl_coef:
        per_token = per_token + options.ipo_kl_coef * (inputs.new - inputs.old).square()
    return TokenLosses(per_token=per_token, clipped=outside)


@policy_loss(clip=None, reads=("sapo_tau_positive", "sapo_tau_negative"))
def sapo(inputs: LossInputs, options: LossOptions) -> TokenLosses:
    """``-4 / tau sigmoid(tau (r - 1)) A`` with a tau by the sign of A: a gradient that fades with the distance (arXiv:2511.20347)."""
    ratio, advantages = inputs.ratio(), inputs.advantages
    tau = ratio.new_tensor(options.sapo_tau_positive).where(advantages > 0, ratio.new_tensor(options.sapo_tau_negative))
    return TokenLosses(per_token=-4.0 / tau * (tau * (ratio - 1.0)).sigmoid() * advantages)


@policy_loss(clip=(0.4, 0.4))
def gmpo(inputs: LossInputs, options: LossOptions) -> TokenLosses:
    """``-A`` times the geometric mean over the sequence of r, each clipped on PPO's side to ``exp(-low)`` and ``exp(high)``.

    GMPO (arXiv:2507.20673), in its token form, as `gspo`. Meant for the aggregation ``seq-mean-token-mean``.
    """
    log_ratio = inputs.new - inputs.old
    clipped = log_ratio.clamp(max=options.eps_clip_high).where(inputs.advantages > 0, log_ratio.clamp(min=-options.eps_clip_low))
    ratio = bounded_exp(inputs.sequence_mean(clipped.detach()) + clipped - clipped.detach())
    return TokenLosses(per_token=-ratio * inputs.advantages, ratio=ratio, clipped=clipped.detach() != log_ratio.detach())


@policy_loss(selects=random_in_covariance_range, reads=("cov_share", "clip_cov_range"))
def clip_cov(inputs: LossInputs, options: LossOptions) -> TokenLosses:
    """`ppo`, without the tokens that `random_in_covariance_range` chose, whose gradient is 0 (arXiv:2505.22617)."""
    per_token, clipped = clipped_objective(inputs.ratio(), inputs.advantages, options)
    chosen = _chosen(inputs)
    return TokenLosses(per_token=per_token.where(~chosen, 0.0), clipped=clipped | chosen, metrics={"selected": chosen.float()})


@policy_loss(clip=None, selects=high_covariance, reads=("cov_share", "kl_cov_coef"))
def kl_cov(inputs: LossInputs, options: LossOptions) -> TokenLosses:
    """``-r A``, plus ``kl_cov_coef |new - old|`` for the tokens that `high_covariance` chose (arXiv:2505.22617)."""
    per_token, chosen = -inputs.ratio() * inputs.advantages, _chosen(inputs)
    penalty = options.kl_cov_coef * (inputs.new - inputs.old).abs()
    return TokenLosses(per_token=per_token + penalty.where(chosen, 0.0), metrics={"selected": chosen.float()})


def _chosen(inputs: LossInputs) -> Tensor:
    if inputs.selected is None:
        raise BatchError("the loss needs the tokens that were selected of the whole batch; see select_tokens")
    return inputs.selected


def clipped_objective(ratio: Tensor, advantages: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped objective, to be minimised, and the tokens whose gradient it removes. # [A], [A] bool."""
    low, high = 1.0 - options.eps_clip_low, 1.0 + options.eps_clip_high
    clipped = ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))
    return (-ratio * advantages).maximum(-ratio.clamp(low, high) * advantages), clipped


POLICY_LOSSES: Mapping[str, PolicyLoss] = MappingProxyType(
    {
        "ppo": ppo,
        "gspo": gspo,
        "cispo": cispo,
        "reinforce": reinforce,
        "dppo_tv": dppo_tv,
        "dppo_kl": dppo_kl,
        "ipo": ipo,
        "sapo": sapo,
        "gmpo": gmpo,
        "clip_cov": clip_cov,
        "kl_cov": kl_cov,
    }
)


def find_loss(name: str) -> PolicyLoss:
    """Return the loss that ``--policy-loss`` names; a name or a file that cannot be used is a `ConfigError`."""
    return facts.find(facts.LOSS, name, POLICY_LOSSES)


def loss_facts(name: str) -> LossFacts:
    """Return the facts of the loss that ``--policy-loss`` names; see `find_loss`."""
    found: LossFacts = facts.facts_of(find_loss(name))
    return found


def select_tokens(loss: PolicyLoss, inputs: LossInputs, options: LossOptions) -> Tensor | None:
    """Return the tokens that a loss wants selected of the whole batch, for `LossInputs.selected`; `None` if it wants none. # [A] bool.

    Args:
        loss: The loss.
        inputs: All action tokens of the batch, `new` being the log-probabilities of the weights before the step.
        options: Its settings.

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


def compute_policy_loss(loss: str | PolicyLoss, inputs: LossInputs, options: LossOptions) -> LossResult:
    """Run a policy loss, given itself or by name, on a micro-batch.

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
