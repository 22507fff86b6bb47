"""Parameters of a model that is being trained, whole or in parts, and copies of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


class Parameters:
    """Access to the parameters of models; here each rank has all of them whole. A back-end that divides them overrides the methods."""

    def gathered(self, parameter: nn.Parameter, *, modify: bool = False) -> AbstractContextManager[Tensor]:
        """The whole parameter within the block; a collective operation if ranks hold parts of it.

        With `modify`, what the block writes into it is kept; every rank must write the same.
        """
        del modify
        return nullcontext(parameter.data)

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        """Return the shape of the whole parameter."""
        return parameter.shape

    def part(self, parameter: nn.Parameter) -> Tensor | None:
        """Return this rank's part of a parameter; `None` where it is whole.

        Parts are equally long slices of the flattened parameter, in the order of ranks, padded at the end.
        """
        del parameter
        return None

    def named(self, model: nn.Module, *, trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under its name in the model, one at a time, tied ones once; with `trained`, only those that are trained.

        Where ranks hold parts, gathering a parameter is a collective operation: every rank iterates to the end. A tensor is valid until the
        next one is asked for.
        """
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or not trained:
                with self.gathered(parameter) as tensor:
                    yield name, tensor

    @torch.no_grad()
    def copy(self, source: nn.Module, target: nn.Module) -> None:
        """Give `target` the weights of `source`, parameter by parameter; both are equally partitioned or not at all."""
        for mine, theirs in zip(source.parameters(), target.parameters(), strict=True):
            with self.gathered(mine) as tensor, self.gathered(theirs, modify=True) as copy:
                copy.copy_(tensor)


WHOLE = Parameters()
"""Access to models that no back-end has divided."""


def copied(parameters: Iterable[tuple[str, Tensor]], *, keep: bool) -> dict[str, Tensor]:
    """Return copies of the parameters in CPU memory, on ranks that are to `keep` them; every rank iterates to the end."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in parameters if keep}


@contextmanager
def on_device(module: Any, device: torch.device) -> Iterator[None]:
    """Within the block, a module that is kept in CPU memory is on the device; the copy in CPU memory stays as it is.

    Parameters of which ranks hold parts are empty here, and their back-end moves the parts.
    """
    tensors = [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else []
    held = [(tensor, tensor.data) for tensor in tensors if tensor.device != device and tensor.numel()]
    for tensor, data in held:
        tensor.data = data.to(device, non_blocking=True, copy=True)
    try:
        yield
    finally:
        for tensor, data in held:
            tensor.data = data


@torch.no_grad()
def move(module: nn.Module, device: torch.device, *, weights: bool) -> None:
    """Drop gradients, and move parameters and buffers if `weights` are to be moved."""
    for parameter in module.parameters():
        parameter.grad = None
    for tensor in [*module.parameters(), *module.buffers()] if weights else []:
        tensor.data = tensor.data.to(device)
