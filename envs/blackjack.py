"""Blackjack: a game of chance from gymnasium, where every group plays the same cards.

It teaches seeds and the policy for answers that name no action. The members of a group get the same seed, so they are
dealt the same first cards, and what sets their rewards apart is how they play, and not their luck alone. One answer
that is neither hit nor stick is asked again, for a small price; a second one in a row forfeits the game. Run it with::

    agentrl train --agent envs/blackjack.py --async

    user       Blackjack: get close to 21, not above.
               You 14, dealer 6. Choose: hit or stick?
    assistant  hit
    user       You 19, dealer 6. Choose: hit or stick?
    assistant  stick

The same without a file: ``--agent 'gym:Blackjack-v1?max_invalid=1&invalid_reward=-0.1'``.
"""

from typing import Any

from agentrl import GymEnv


class Blackjack(GymEnv):
    """A win pays 1, a loss costs 1."""

    env_id = "Blackjack-v1"
    actions = {"hit": 1, "stick": 0}
    max_invalid = 1
    invalid_reward = -0.1

    def instructions(self) -> str:
        """The goal of the game, before the first observation."""
        return "Blackjack: get close to 21, not above."

    def format_observation(self, observation: Any) -> str:
        """Gymnasium's observation is the own sum, the dealer's card, and whether an ace counts 11."""
        own, dealer, ace = observation
        return f"You {own}{' with an ace' if ace else ''}, dealer {dealer}. Choose: hit or stick?"

    def score(self, total: float, terminated: bool) -> float:
        """Won or not; without this method the score would be the reward, clipped to 0..1."""
        return float(terminated and total > 0)
