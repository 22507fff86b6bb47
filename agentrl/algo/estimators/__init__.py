"""Advantage estimators: how rewards become one number per action token.

Each estimator is a file: its options, its function with its facts above it, its formula and source; an example to copy for one's own.
Rules that hold for all of them:

* **Clipping.** The episode's total reward is clipped to ``reward_clip_range`` before anything else. Where turn rewards
  matter (`gae`, `reinforce`) the turn rewards of a clipped episode are all scaled by ``clipped / total``, so that they
  still sum to the clipped total and keep their signs and proportions. The range must therefore contain 0.
* **KL in the reward.** ``kl`` is subtracted token by token after the baseline: a token pays for the divergence of
  itself and of the tokens after it, never for those before it. Baselines and group standard deviations see rewards
  without KL.
* **Equal rewards.** A group whose rewards are all equal (for `group_norm`: but for rounding), or that has a single member, gets
  advantage 0 from `rloo`, `group_norm`, `dr_grpo` (and 0 before whitening from `reinforce_baseline`).
* **Turns.** `turn_gae` and `turn_norm` know turns; for all others the tokens of an episode follow each other without a seam.
* **Ends.** An episode is over at its last action token, also when a budget cut it: nothing is bootstrapped.

torch is imported when advantages are computed, so that a configuration can be checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from agentrl.algo import facts
from agentrl.algo.advantages import AdvantageInputs, AdvantageOptions, Advantages, Estimator, whiten
from agentrl.algo.estimators import (
    batch_std,
    distillation,
    dr_grpo,
    gae,
    gdpo,
    group_norm,
    opo,
    pass_at_k,
    reinforce,
    remax,
    rloo,
    turn_norm,
)
from agentrl.algo.facts import EstimatorFacts

ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        "gae": gae.gae,
        "reinforce": reinforce.reinforce,
        "reinforce_baseline": reinforce.reinforce_baseline,
        "rloo": rloo.rloo,
        "group_norm": group_norm.group_norm,
        "grpo": group_norm.group_norm,
        "dr_grpo": dr_grpo.dr_grpo,
        "turn_gae": gae.turn_gae,
        "turn_norm": turn_norm.turn_norm,
        "opo": opo.opo,
        "batch_std": batch_std.batch_std,
        "pass_at_k": pass_at_k.pass_at_k,
        "gdpo": gdpo.gdpo,
        "remax": remax.remax,
        "distillation": distillation.distillation,
    }
)
"""The built-in estimators by name."""


def find_estimator(name: str) -> Estimator:
    """Return the estimator that ``--advantage-estimator`` names; a name or a file that cannot be used is a `ConfigError`."""
    return facts.find(facts.ESTIMATOR, name, ESTIMATORS)


def estimator_facts(name: str) -> EstimatorFacts:
    """Return the facts of the estimator that ``--advantage-estimator`` names; see `find_estimator`."""
    found: EstimatorFacts = facts.facts_of(find_estimator(name))
    return found


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
    wanted = {"advantages": result.advantages} | ({"returns": result.returns} if stated.needs_critic else {})
    for name, tensor in wanted.items():
        _check_tokens(function, name, tensor, inputs)
    advantages = result.advantages.detach().to(inputs.token_rewards.dtype)
    if stated.whitens:
        advantages = whiten(advantages, std_norm=options.advantage_std_norm)
    return Advantages(advantages=advantages, returns=result.returns if stated.needs_critic else None)


def _check_tokens(function: Estimator, name: str, value: Any, inputs: AdvantageInputs) -> None:
    """Check that a value is a tensor of one finite number per action token."""
    import torch

    size = len(inputs.token_rewards)
    if not isinstance(value, torch.Tensor):
        problem = f"returned {name} of type {type(value).__name__}"
    elif value.shape != (size,):
        problem = f"returned {name} of shape {tuple(value.shape)}"
    elif not bool(value.isfinite().all()):
        problem = f"returned {name} that are not all finite"
    else:
        return
    raise facts.unusable(facts.ESTIMATOR, function, problem, f"Return a tensor of {size} finite numbers, one per action token.")
