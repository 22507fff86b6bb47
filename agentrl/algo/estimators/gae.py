"""Advantages from the values of a critic, by token or by turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from agentrl.algo.advantages import AdvantageInputs, Advantages, DiscountedOptions
from agentrl.algo.facts import advantage_estimator
from agentrl.algo.statistics import reverse_discounted_cumsum, segment_count
from agentrl.core.errors import ConfigError
from agentrl.core.settings import Fraction, Positive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GaeOptions(DiscountedOptions):
    """Options of `gae` and `turn_gae`."""

    gae_lambda: Fraction | Literal["adaptive"] = 1.0
    """Lambda of ``gae``: 1 has no bias from the critic, lower has less variance. ``adaptive``: 1 - 1 / (``--gae-alpha`` x length of the
    episode), as in VAPO, and at least 0."""
    gae_alpha: Positive = 0.05
    """With ``--gae-lambda adaptive``: how fast lambda comes near to 1 in long episodes."""
    critic_lambda: Fraction | Literal["same"] = "same"
    """Lambda of the targets of the critic, where it is another one than that of the advantages; 1 in VAPO: what was earned."""
    bootstrap_truncated: bool = True
    """Take the critic's value for what an episode did not come to earn because a limit of turns, tokens or time cut it; off: 0, as for
    an episode that ended."""


@advantage_estimator(options=GaeOptions, needs_critic=True, whitens=True, charges_kl=True)
def gae(inputs: AdvantageInputs, options: GaeOptions) -> Advantages:
    """Generalised advantage estimation over the action tokens of an episode, whitened (arXiv:1506.02438).

    ``d[t] = r[t] + gamma V[t+1] - V[t]``, ``A[t] = d[t] + gamma lambda A[t+1]``, ``returns = A + V`` before whitening. Behind the last
    token ``V[t+1]`` is 0 if the episode ended, and the critic's value of what was read last if it was cut short (arXiv:1712.00378). The
    returns may have a lambda of their own (VC-PPO, arXiv:2503.01491), and lambda may depend on the length of the episode (VAPO,
    arXiv:2504.05118).
    """
    if inputs.values is None:
        raise ConfigError("--advantage-estimator", "gae", "needs the values of a critic", "Train with a critic or choose another estimator")
    deltas = inputs.clipped_token_rewards(options) + options.gamma * inputs.next_values(inputs.values, inputs.episode) - inputs.values
    length = segment_count(inputs.episode, len(inputs.rewards))
    advantages = inputs.sum_ahead(deltas, _decay(options, length))
    ahead = advantages if options.critic_lambda == "same" else inputs.sum_ahead(deltas, options.gamma * options.critic_lambda)
    return Advantages(advantages=advantages, returns=ahead + inputs.values)


@advantage_estimator(options=GaeOptions, needs_critic=True, whitens=True, charges_kl=True)
def turn_gae(inputs: AdvantageInputs, options: GaeOptions) -> Advantages:
    """`gae` with a turn as one action: the value at its first token, its rewards minus its KL, one advantage for all tokens; whitened.

    Turn-level GAE (Turn-PPO, arXiv:2512.17008). The discount is per turn. All tokens of a turn share the target of the critic.
    """
    if inputs.values is None:
        raise ConfigError("--advantage-estimator", "turn_gae", "needs the values of a critic", "Train with a critic")
    turns = inputs.turns(options)
    values, rewards = inputs.values[turns.start].double(), turns.rewards - _paid_by_turns(inputs, turns.of_token, len(turns.start))
    deltas = rewards + options.gamma * inputs.next_values(values, turns.episode) - values
    length = segment_count(turns.episode, len(inputs.rewards))
    advantages = reverse_discounted_cumsum(deltas, turns.episode, _decay(options, length))
    ahead = advantages
    if options.critic_lambda != "same":
        ahead = reverse_discounted_cumsum(deltas, turns.episode, options.gamma * options.critic_lambda)
    dtype = inputs.token_rewards.dtype
    return Advantages(advantages=advantages.to(dtype)[turns.of_token], returns=(ahead + values).to(dtype)[turns.of_token])


def _decay(options: GaeOptions, length: Tensor) -> float | Tensor:
    """Discount of what is ahead, of which there is one for each episode where lambda depends on its length. # [E]."""
    if options.gae_lambda != "adaptive":
        return options.gamma * options.gae_lambda
    return options.gamma * (1.0 - 1.0 / (options.gae_alpha * length.clamp(min=1).double())).clamp(min=0.0).float()


def _paid_by_turns(inputs: AdvantageInputs, of_token: Tensor, turns: int) -> Tensor:
    """KL penalty of each turn. # [T]."""
    paid = inputs.token_rewards.new_zeros(turns).double()
    return paid if inputs.kl is None else paid.index_add(0, of_token, inputs.kl.double())
