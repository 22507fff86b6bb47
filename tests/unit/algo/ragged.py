"""Random ragged batches, flat as agentrl wants them and padded as other libraries want them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentrl.algo.advantages import AdvantageInputs


@dataclass(frozen=True)
class Ragged:
    """Episodes of action tokens, with environment tokens strewn in between when padded."""

    lengths: Tensor  # [E] action tokens
    episode: Tensor  # [A]
    group: Tensor  # [E]
    mask: Tensor  # [E, L] where the action tokens are
    generator: torch.Generator

    @property
    def size(self) -> int:
        return len(self.episode)

    @property
    def last(self) -> Tensor:
        """Position of each episode's last action token. # [E]."""
        return self.lengths.cumsum(0) - 1

    @property
    def index(self) -> np.ndarray:
        """Group of each episode, as verl takes it."""
        return np.array([f"group {g}" for g in self.group.tolist()], dtype=object)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def pad(self, flat: Tensor, fill: float = 0.0) -> Tensor:
        """Spread a flat tensor over the padded layout; differentiable. # [A] -> [E, L]."""
        padded = torch.full(self.mask.shape, fill, dtype=flat.dtype)
        return padded.masked_scatter(self.mask, flat)

    def flat(self, padded: Tensor) -> Tensor:
        return padded[self.mask]

    def at_end(self, rewards: Tensor) -> Tensor:
        """Rewards at the last action token of their episode. # [E] -> [A]."""
        flat = torch.zeros(self.size)
        flat[self.last] = rewards
        return flat


def ragged(seed: int, *, groups: int = 4, members: int = 3, longest: int = 9) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    episodes = groups * members
    lengths = torch.randint(1, longest + 1, (episodes,), generator=generator)
    mask = torch.zeros(episodes, 2 * longest, dtype=torch.bool)
    for row, length in enumerate(lengths.tolist()):
        mask[row, torch.randperm(2 * longest, generator=generator)[:length]] = True
    return Ragged(
        lengths=lengths,
        episode=torch.repeat_interleave(torch.arange(episodes), lengths),
        group=torch.arange(groups).repeat_interleave(members),
        mask=mask,
        generator=generator,
    )


def outcome_inputs(batch: Ragged, rewards: Tensor, values: Tensor | None = None, kl: Tensor | None = None) -> AdvantageInputs:
    return AdvantageInputs(
        token_rewards=batch.at_end(rewards), episode=batch.episode, group=batch.group, rewards=rewards, values=values, kl=kl
    )


def gradient(loss_of: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    """A loss and its gradient."""
    leaf = at.clone().requires_grad_(True)
    loss = loss_of(leaf)
    (slope,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), slope
