"""Calls of the chosen algorithm, built-in or a user's own, and checks of what it returns: advantages, correction weights, policy losses.

torch is imported when something is computed, so that a configuration can be checked without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentrl.algo import facts
from agentrl.algo.advantages import AdvantageInputs, AdvantageOptions, Advantages, Estimator, whiten
from agentrl.algo.corrections import find_correction
from agentrl.algo.estimators import find_estimator
from agentrl.algo.facts import EstimatorFacts, Kind, LossFacts
from agentrl.algo.losses import find_loss
from agentrl.algo.off_policy import Correction, CorrectionInputs, OffPolicyCorrection, TokenWeights, diagnostics
from agentrl.algo.row_losses import METRICS, OWN, ObjectiveFunction, RowLosses, RowScores, StepRows
from agentrl.algo.statistics import fraction, record_extremes, record_means
from agentrl.algo.token_losses import LossInputs, LossResult, PolicyLoss, TokenLosses
from agentrl.core.metrics import MetricSums

if TYPE_CHECKING:
    from torch import Tensor


def compute_advantages(estimator: str | Estimator, inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """Run an estimator, given itself or by name, on the whole batch; whiten its advantages if that is among its facts.

    Args:
        estimator: The estimator.
        inputs: The whole batch.
        options: Of the class among the facts of the estimator.

    Raises:
        ConfigError: If the name is unknown, or values of a critic are missing.
        PluginError: If a user's estimator raised an exception, or returned something unusable.
    """
    import torch

    function = find_estimator(estimator) if isinstance(estimator, str) else estimator
    stated: EstimatorFacts = facts.facts_of(function)
    with torch.no_grad(), facts.calls(facts.ESTIMATOR, function):
        returned = function(inputs, options)
    result = returned if isinstance(returned, Advantages) else Advantages(advantages=returned)
    wanted: dict[str, Any] = {"advantages": result.advantages} | ({"returns": result.returns} if stated.needs_critic else {})
    remedy = _check_tokens(facts.ESTIMATOR, function, wanted, inputs.token_rewards, "finite numbers")
    for name, tensor in wanted.items():
        if not bool(tensor.isfinite().all()):
            raise facts.unusable(facts.ESTIMATOR, function, f"returned {name} that are not all finite", remedy)
    advantages = result.advantages.detach().to(inputs.token_rewards.dtype)
    if stated.whitens:
        advantages = whiten(advantages, std_norm=options.advantage_std_norm)
    return Advantages(advantages=advantages, returns=result.returns if stated.needs_critic else None)


def compute_correction(correction: str | OffPolicyCorrection, inputs: CorrectionInputs, options: Any) -> Correction:
    """Run a correction, given itself or by name, on whole rows.

    Args:
        correction: The correction.
        inputs: The action tokens; of the whole batch if `needs_whole_batch` says so.
        options: Of the class among the facts of the correction.

    Raises:
        ConfigError: If the name is unknown.
        PluginError: If a user's correction raised an exception, or returned something unusable.
    """
    import torch

    function = find_correction(correction) if isinstance(correction, str) else correction
    with torch.no_grad():
        with facts.calls(facts.CORRECTION, function):
            returned = function(inputs, options)
        result = returned if isinstance(returned, TokenWeights) else TokenWeights(weights=returned)
        _check_weights(function, result, inputs)
        keep = result.weights != 0 if result.keep is None else result.keep
        # Not a product: 0 times a weight that is no number is no number.
        weights = torch.where(keep, result.weights.to(inputs.old.dtype), 0.0)
        bounded = torch.zeros_like(keep) if result.bounded is None else result.bounded
        return Correction(weights=weights, keep=keep, stats=diagnostics(inputs, weights, keep, bounded))


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
    _check_losses(function, losses, inputs)
    stats = _statistics(inputs, losses)
    for name, values in losses.metrics.items():
        if f"policy/{name}" in stats.sums:
            raise facts.unusable(facts.LOSS, function, f"returned a metric {name!r}, which every loss has", "Give it another name.")
        total = values.sum()
        record_means(stats, {f"policy/{name}": (total, total.new_tensor(values.numel()))})
    ratio = inputs.ratio() if losses.ratio is None else losses.ratio
    return LossResult(per_token=losses.per_token, stats=stats, ratio=ratio.detach(), clipped=losses.clipped)


def compute_objective(function: ObjectiveFunction, scores: RowScores, options: Any) -> RowLosses:
    """Run an objective of supervised or preference training on whole rows.

    Args:
        function: The objective.
        scores: The rows.
        options: Of the class among its facts.

    Raises:
        PluginError: If a user's objective raised an exception, or returned something unusable.
    """
    import torch

    with facts.calls(facts.OBJECTIVE, function):
        returned = function(scores, options)
    found = returned if isinstance(returned, RowLosses) else RowLosses(losses=returned, metrics={})
    unit = facts.facts_of(function).unit
    sizes = {"place": len(scores.row), "row": scores.num_rows, "pair": scores.num_rows // 2}
    wanted = {"losses": (found.losses, sizes[unit])} | ({} if found.rewards is None else {"rewards": (found.rewards, sizes["row"])})
    for name, (values, size) in wanted.items():
        if not isinstance(values, torch.Tensor) or values.shape != (size,):
            what = f"of shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else f"of type {type(values).__name__}"
            remedy = f"Return a tensor of {size} numbers, one per {unit if name == 'losses' else 'row'}."
            raise facts.unusable(facts.OBJECTIVE, function, f"returned {name} {what}", remedy)
    if scores.outputs.requires_grad and not found.losses.requires_grad:
        raise facts.unusable(
            facts.OBJECTIVE, function, "returned losses without a gradient", "Compute them from scores.outputs, not detached."
        )
    if not all(isinstance(values, torch.Tensor) and values.ndim == 1 for values in found.metrics.values()):
        raise facts.unusable(
            facts.OBJECTIVE, function, "returned a metric that is no tensor of numbers", "Return tensors of one dimension."
        )
    return replace(found, metrics={name if name in METRICS else f"{OWN}{name}": values for name, values in found.metrics.items()})


def prepare_rows(function: ObjectiveFunction, step: StepRows, options: Any) -> Mapping[str, Tensor]:
    """Return the values of rows that an objective makes of all rows of a step; see `agentrl.algo.facts.objective`. # [R] each.

    Raises:
        PluginError: If a user's function raised an exception, or returned something unusable.
    """
    import torch

    prepare = facts.facts_of(function).prepare
    if prepare is None:
        return {}
    with torch.no_grad(), facts.calls(facts.OBJECTIVE, prepare):
        found: Mapping[str, Tensor] = prepare(step, options)
    if not isinstance(found, Mapping) or not all(
        isinstance(each, torch.Tensor) and each.shape == step.sums.shape for each in found.values()
    ):
        problem = "returned something else than tensors of one number per row, by name"
        raise facts.unusable(facts.OBJECTIVE, prepare, problem, f"Return a dictionary of tensors of {len(step.sums)} numbers.")
    return found


def _check_tokens(kind: Kind, function: Callable[..., Any], values: Mapping[str, Any], like: Tensor, numbers: str) -> str:
    """Check that each value is a tensor of one entry per action token; return the remedy."""
    import torch

    remedy = f"Return a tensor of {len(like)} {numbers}, one per action token."
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or value.shape != like.shape:
            what = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"of type {type(value).__name__}"
            raise facts.unusable(kind, function, f"returned {name} {what}", remedy)
    return remedy


def _check_weights(function: OffPolicyCorrection, result: TokenWeights, inputs: CorrectionInputs) -> None:
    """Check that there is one finite weight per action token, and one truth value in each mask."""
    import torch

    masks = {name: mask for name, mask in (("keep", result.keep), ("bounded", result.bounded)) if mask is not None}
    remedy = _check_tokens(facts.CORRECTION, function, {"weights": result.weights, **masks}, inputs.old, "finite numbers")
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise facts.unusable(facts.CORRECTION, function, f"returned {name} of {mask.dtype}", "Return a tensor of truth values.")
    # Log-probabilities that are no numbers come from the model: the update is skipped, and the correction is not to blame.
    if not bool(result.weights.isfinite().all()) and bool(inputs.log_rho.isfinite().all()):
        raise facts.unusable(facts.CORRECTION, function, "returned weights that are not all finite", remedy)


def _check_losses(function: PolicyLoss, losses: TokenLosses, inputs: LossInputs) -> None:
    """Check that there is one number per action token, with a gradient."""
    import torch

    others = {name: value for name, value in (("ratio", losses.ratio), ("clipped", losses.clipped)) if value is not None}
    _check_tokens(facts.LOSS, function, {"per_token": losses.per_token, **others}, inputs.new, "numbers")
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
        # With expm1 below, because exp(d) - 1 in float32 loses every digit where the policies are close.
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
