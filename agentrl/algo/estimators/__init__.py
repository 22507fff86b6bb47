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
* **Turns.** `turn_gae`, `turn_norm` and `gigpo` know turns; for all others the tokens of an episode follow each other without a seam.
* **Ends.** An episode is over at its last action token, also when a budget cut it: nothing is bootstrapped.

torch is imported when advantages are computed, so that a configuration can be checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.algo import facts
from agentrl.algo.advantages import Estimator
from agentrl.algo.facts import EstimatorFacts

ESTIMATORS: Mapping[str, Estimator] = facts.found_in(__name__, __path__, "group_norm")
"""The built-in estimators by name."""


def find_estimator(name: str) -> Estimator:
    """Return the estimator that ``--advantage-estimator`` names; a name or a file that cannot be used is a `ConfigError`."""
    return facts.find(facts.ESTIMATOR, name, ESTIMATORS)


def estimator_facts(name: str) -> EstimatorFacts:
    """Return the facts of the estimator that ``--advantage-estimator`` names; see `find_estimator`."""
    found: EstimatorFacts = facts.facts_of(find_estimator(name))
    return found
