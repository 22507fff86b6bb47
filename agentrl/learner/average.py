"""An exponential moving average of the policy's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentrl.learner.engine import full_shape
from agentrl.learner.ranks import Ranks
from agentrl.learner.saved import join_slices


class WeightAverage:
    """``average = decay * average + (1 - decay) * weights`` after each step, in float32.

    Under ZeRO-3 every rank averages the part of each parameter that it holds; otherwise the first rank averages all.

    Args:
        model: The model being trained.
        decay: In 0..1; the average looks back over about ``1 / (1 - decay)`` steps.
        ranks: The data-parallel ranks.
    """

    def __init__(self, model: nn.Module, decay: float, ranks: Ranks) -> None:
        self._model, self._decay, self._ranks = model, decay, ranks
        self._parts = {name: part.to(torch.float32, copy=True) for name, part in self._held()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the current weights."""
        for name, part in self._held():
            self._parts[name].lerp_(part.float(), 1.0 - self._decay)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole averaged parameters under their names in the model; a collective operation under ZeRO-3."""
        for name, parameter in self._model.named_parameters():
            if hasattr(parameter, "ds_id"):
                yield name, self._gather(self._parts[name], parameter).to(parameter.dtype)
            elif self._ranks.first:
                yield name, self._parts[name].to(parameter.dtype)

    def state(self) -> dict[str, Tensor]:
        """The parts that this rank holds, by the parameter's name."""
        return self._parts

    def restore(self, ranks: Sequence[Mapping[str, Tensor]]) -> None:
        """Continue from what `state` gave on all ranks, which may have been others than now."""
        for name, parameter in self._model.named_parameters():
            if name not in self._parts:
                continue
            part, flat = self._parts[name].view(-1), saved_average(ranks, name, full_shape(parameter)).flatten()
            first = min(part.numel() * self._ranks.rank, flat.numel()) if hasattr(parameter, "ds_id") else 0
            share = flat[first : first + part.numel()]
            part[: share.numel()].copy_(share)

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            part: Any = getattr(parameter, "ds_tensor", parameter.data if self._ranks.first else None)
            if part is not None:
                yield name, part.detach()

    def _gather(self, part: Tensor, parameter: nn.Parameter) -> Tensor:
        """Parts are equally long slices of the flattened parameter, in the order of ranks, padded at the end."""
        shape = full_shape(parameter)
        slices = [torch.empty_like(part) for _ in range(self._ranks.world_size)]
        dist.all_gather(slices, part.contiguous())
        return join_slices(slices, shape)


def saved_average(ranks: Sequence[Mapping[str, Tensor]], name: str, shape: torch.Size) -> Tensor:
    """A whole averaged parameter, from what `WeightAverage.state` gave on all ranks."""
    return join_slices([parts[name] for parts in ranks if name in parts], shape)
