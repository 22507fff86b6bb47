"""Losses of the policy and the critic: from action tokens to a loss for each of them, and from those to one number.

Each policy loss is one function with its facts above it, and an example to copy for one's own. Throughout, ``r = exp(clamp(new - old,
+-20))``, ``low = 1 - eps_clip_low`` and ``high = 1 + eps_clip_high``. Correction weights and aggregation come afterwards and are the
same for all of them. torch is imported when a loss is computed, so that a configuration can be checked without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from agentrl.algo import facts
from agentrl.algo.facts import LossFacts, policy_loss
from agentrl.algo.statistics import bounded_exp, fraction, record_extremes, record_means, segment_mean
from agentrl.core.errors import BatchError, ConfigError
from agentrl.core.metrics import MetricSums

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossResult:
    """A loss before correction and aggregation, and its statistics."""

    per_token: Tensor  # [A]: to be minimised
    stats: MetricSums  # metrics of these tokens


def value_loss(new: Tensor, old: Tensor, returns: Tensor, value_clip: float | None) -> LossResult:
    """``0.5 max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2)`` (arXiv:1707.06347, as in the authors' code).

    Args:
        new: Values of the critic being trained, with gradient. # [A]
        old: Values when the batch was taken. # [A]
        returns: Targets, from the estimator. # [A]
        value_clip: How far a value may move from `old`; `None` switches clipping off.

    Returns:
        The loss per action token, with ``value/mean``, ``value/return_mean``, ``value/error`` (mean squared) and
        ``value/clip_fraction``.
    """
    free = (new - returns).square()
    worst = free
    if value_clip is not None:
        worst = free.maximum((old + (new - old).clamp(-value_clip, value_clip) - returns).square())
    stats, count = MetricSums(), new.new_tensor(float(len(new)))
    record_means(
        stats,
        {
            "value/mean": (new.sum(), count),
            "value/return_mean": (returns.sum(), count),
            "value/error": (free.sum(), count),
            "value/clip_fraction": ((worst > free).sum(), count),
        },
    )
    return LossResult(per_token=0.5 * worst, stats=stats)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """Settings of the policy losses, named as in the configuration.

    Attributes:
        eps_clip_low: The ratio is clipped below at 1 - this.
        eps_clip_high: The ratio is clipped above at 1 + this.
        dual_clip: For a negative advantage A the objective of `ppo` is at least this times A; `None` switches it off.
    """

    eps_clip_low: float = 0.2
    eps_clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        if self.dual_clip is not None and self.dual_clip <= 1.0:
            raise ConfigError("--dual-clip", self.dual_clip, "must be larger than 1", "Use 3, or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """The action tokens of one micro-batch.

    Attributes:
        new: Log-probabilities under the weights being trained, with gradient. # [A]
        old: The same under the learner's weights when the batch was taken. # [A]
        advantages: As from `compute_advantages`. # [A]
        sequence: Row of each token, from 0; rows are never split between micro-batches. # [A] int64

    Raises:
        BatchError: If the lengths disagree.
    """

    new: Tensor
    old: Tensor
    advantages: Tensor
    sequence: Tensor

    def __post_init__(self) -> None:
        for name, tensor in {"old": self.old, "advantages": self.advantages, "sequence": self.sequence}.items():
            if tensor.shape != self.new.shape:
                raise BatchError(f"{name} has shape {tuple(tensor.shape)}, new {tuple(self.new.shape)}: one entry per action token")

    def ratio(self) -> Tensor:
        """Return the ratio of new to old policy, its logarithm clamped to +-20; with gradient. # [A]."""
        return bounded_exp(self.new - self.old)

    def sequence_mean(self, per_token: Tensor) -> Tensor:
        """Give every token the mean over its row. # [A] -> [A]."""
        rows = int(self.sequence.max()) + 1 if self.sequence.numel() else 0
        return segment_mean(per_token, self.sequence, rows)[self.sequence]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLosses:
    """The loss of every action token, with what is reported about it.

    Attributes:
        per_token: To be minimised. # [A]
        ratio: The ratio that the loss uses, for ``policy/ratio_mean`` and the like; unset: that of new to old policy. # [A]
        clipped: Tokens whose gradient the loss removes or bounds, for ``policy/clip_fraction``; unset: none. # [A] bool
        metrics: Numbers of some of the tokens by name, or of all; their mean is reported as ``policy/<name>``. # [any]
    """

    per_token: Tensor
    ratio: Tensor | None = None
    clipped: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


PolicyLoss: TypeAlias = "Callable[[LossInputs, LossOptions], Tensor | TokenLosses]"


@policy_loss(dual_clip=True)
def ppo(inputs: LossInputs, options: LossOptions) -> TokenLosses:
    """``-min(r A, clip(r, low, high) A)``, for A < 0 and dual clip c ``-max(that min, c A)``.

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
    """``-stop_gradient(clip(r, low, high)) A new``: every token keeps a gradient (CISPO, arXiv:2506.13585)."""
    ratio = inputs.ratio().detach()
    weight = ratio.clamp(1.0 - options.eps_clip_low, 1.0 + options.eps_clip_high)
    return TokenLosses(per_token=-weight * inputs.advantages * inputs.new, clipped=weight != ratio)


@policy_loss(single_update=True)
def reinforce(inputs: LossInputs, options: LossOptions) -> Tensor:
    """``-A new``, without a ratio: for exactly on-policy batches (Williams, 1992)."""
    del options
    return -inputs.advantages * inputs.new


def clipped_objective(ratio: Tensor, advantages: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped objective, to be minimised, and the tokens whose gradient it removes. # [A], [A] bool."""
    low, high = 1.0 - options.eps_clip_low, 1.0 + options.eps_clip_high
    clipped = ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))
    return (-ratio * advantages).maximum(-ratio.clamp(low, high) * advantages), clipped


POLICY_LOSSES: Mapping[str, PolicyLoss] = MappingProxyType({"ppo": ppo, "gspo": gspo, "cispo": cispo, "reinforce": reinforce})


def find_loss(name: str) -> PolicyLoss:
    """Return the loss that ``--policy-loss`` names; a name or a file that cannot be used is a `ConfigError`."""
    return facts.find(facts.LOSS, name, POLICY_LOSSES)


def loss_facts(name: str) -> LossFacts:
    """Return the facts of the loss that ``--policy-loss`` names; see `find_loss`."""
    found: LossFacts = facts.facts_of(find_loss(name))
    return found


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
    return LossResult(per_token=losses.per_token, stats=stats)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Sizes of one optimizer step, summed over micro-batches and ranks.

    Every micro-batch of every rank divides by the same numbers, so the sum of the parts is the loss of the whole, however it was cut.
    """

    tokens: float  # action tokens, masked ones included
    episodes: float  # episodes; one with several branches counts once
    constant: float  # tokens every episode is taken to have in the aggregation ``constant``


Weighting: TypeAlias = "Callable[[Tensor, Denominators], Tensor | float]"
"""From the length of each token's episode # [A] and the denominators to each token's weight in the loss."""

AGGREGATIONS: Mapping[str, Weighting] = MappingProxyType(
    {
        "token-mean": lambda _, sizes: 1.0 / max(sizes.tokens, 1.0),
        "seq-mean-token-mean": lambda length, sizes: 1.0 / (length * max(sizes.episodes, 1.0)),
        "seq-mean-token-sum": lambda _, sizes: 1.0 / max(sizes.episodes, 1.0),
        "constant": lambda _, sizes: 1.0 / (max(sizes.episodes, 1.0) * sizes.constant),
    }
)


def aggregate(per_token: Tensor, *, episode_length: Tensor, mode: str, denominators: Denominators) -> Tensor:
    """Return the share of this micro-batch in the loss of the whole optimizer step.

    ``token-mean`` weights tokens equally, ``seq-mean-token-mean`` episodes equally, ``seq-mean-token-sum`` is the mean
    over episodes of their sums, ``constant`` divides that by a fixed length (Dr. GRPO, arXiv:2503.20783).

    Args:
        per_token: Loss of each action token, 0 where masked. # [A]
        episode_length: Action tokens of the token's episode, over all its branches. # [A]
        mode: A key of `AGGREGATIONS`.
        denominators: Sizes of the whole optimizer step.

    Returns:
        A scalar; the sum over micro-batches and ranks is the loss. 0, with a gradient, for an empty micro-batch.
    """
    if mode not in AGGREGATIONS:
        raise ConfigError("--loss-aggregation", mode, "is not an aggregation", f"Choose one of {', '.join(AGGREGATIONS)}")
    return (per_token * AGGREGATIONS[mode](episode_length.to(per_token.dtype), denominators)).sum()
