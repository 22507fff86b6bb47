"""Settings of agents that are played by somebody else than the policy that is trained."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.core.settings import Count


@dataclass(frozen=True, kw_only=True)
class PartnerConfig:
    """Agents that the policy does not play."""

    partner: tuple[str, ...] = ()
    """Agents that the policy does not play, and who does: ``NAME=past``, earlier weights of this run (self-play); ``NAME=model:DIR``,
    another model; ``NAME=endpoint:URL#model=M``, a service like OpenAI's. They are not trained."""
    partner_every: Count = 50
    """Steps after which the present weights join those of ``NAME=past``, again and again."""
    partner_pool: Count = 4
    """Newest of the earlier weights that ``NAME=past`` is drawn from, for each group; the model to begin with is one of them at first."""
