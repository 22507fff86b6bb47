"""Parameters that DeepSpeed holds in parts: ZeRO-3 a slice of each on every rank, tensor parallelism a part of each layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from agentrl.learner.parameters import Parameters


class ZeroParameters(Parameters):
    """Access to the parameters of modules under DeepSpeed, at any ZeRO stage."""

    @contextmanager
    def gathered(self, parameter: nn.Parameter, *, modify: bool = False) -> Iterator[Tensor]:
        """The whole parameter within the block; see `Parameters.gathered`."""
        parts = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if modify else None) if parts else nullcontext():
            yield parameter.data if modify else undivided(parameter, parameter.data)

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        """Return the shape of the whole parameter."""
        shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
        return shape

    def part(self, parameter: nn.Parameter) -> Tensor | None:
        """Return this rank's slice of a parameter under ZeRO-3; `None` where it is whole."""
        part: Tensor | None = getattr(parameter, "ds_tensor", None)
        return part


PARAMETERS = ZeroParameters()
"""Access to the parameters of modules under DeepSpeed, and of those that are not."""


def is_divided(parameter: Tensor) -> bool:
    """Return True for a parameter of which this rank holds a part because of ``--learner-tensor-parallel``."""
    return bool(getattr(parameter, "ds_is_replaced_module", False))


@torch.no_grad()
def undivided(parameter: Any, tensor: Tensor) -> Tensor:
    """Return the whole of a divided parameter, of which `tensor` is this rank's part, and any other as it is; collective."""
    if not is_divided(parameter):
        return tensor
    held = parameter.data
    parameter.data = tensor
    try:
        parameter.gather_params([parameter])
        whole: Tensor = parameter.data
    finally:
        parameter.data = held
    return whole
