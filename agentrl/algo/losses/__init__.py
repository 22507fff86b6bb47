"""Losses of the policy: from action tokens to a loss for each of them.

Each loss is a file: its options, its function with its facts above it, its formula and source; an example to copy for one's own.
Throughout, ``r = exp(clamp(new - old, +-20))``, ``p = exp(new)``, ``q = exp(old)``, and ``low`` and ``high`` are ``eps_clip_low`` and
``eps_clip_high``, whose defaults are those of the loss. Correction weights and aggregation come
afterwards and are the same for all of them. torch is imported when a loss is computed, so that a configuration can be checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.algo import facts
from agentrl.algo.facts import LossFacts
from agentrl.algo.token_losses import PolicyLoss

POLICY_LOSSES: Mapping[str, PolicyLoss] = facts.found_in(__name__, __path__, "ppo")
"""The built-in losses by name."""


def find_loss(name: str) -> PolicyLoss:
    """Return the loss that ``--policy-loss`` names; a name or a file that cannot be used is a `ConfigError`."""
    return facts.find(facts.LOSS, name, POLICY_LOSSES)


def loss_facts(name: str) -> LossFacts:
    """Return the facts of the loss that ``--policy-loss`` names; see `find_loss`."""
    found: LossFacts = facts.facts_of(find_loss(name))
    return found
