"""State of one trained model in a checkpoint, whole and by parameter name, whichever back-end wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from agentrl.core.errors import CheckpointError

NUM_LEARNERS, BACKEND_KEY = "--num-learners", "--learner-backend"
"""Keys of a checkpoint's layout: the number of ranks, and the back-end that wrote it."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's moments."""

Layout = Mapping[str, Any]
"""Facts that the files of a checkpoint depend on, by the flag that decides each."""


class SavedState(Protocol):
    """Weights and AdamW's state of one trained model; looking at one parameter costs the memory of that parameter."""

    counters: dict[str, int]  # the back-end's own counts of steps
    buffers: dict[str, Tensor]  # tensors of the module that are not parameters, by name

    def __getitem__(self, name: str) -> Tensor:
        """A parameter as the optimizer has it."""

    def moment(self, name: str, key: str) -> Tensor | None:
        """One of the `MOMENTS` of a parameter; `None` before its first update."""

    def step(self, name: str) -> float | None:
        """Updates that the moments of a parameter have seen; `None` before the first."""

    def last_step(self) -> float | None:
        """The most updates that any parameter has seen."""


def join_slices(slices: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Put the slices of a flattened parameter together, in the order of ranks; what is too much at the end is padding."""
    flat = slices[0].flatten() if len(slices) == 1 else torch.cat([piece.flatten() for piece in slices])
    return flat[: shape.numel()].view(shape)


def read_tensors(path: Path, *, mapped: bool = True) -> dict[str, Any]:
    """A torch file, mapped into memory unless it is to be changed there; pickled code in it is refused."""
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except Exception as error:  # torch reports a broken file as one of many
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    return content
