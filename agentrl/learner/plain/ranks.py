"""The only rank of a learner without DeepSpeed."""

from __future__ import annotations

from typing import Any, Literal

from agentrl.core.errors import LearnerError
from agentrl.learner.ranks import Ranks, choose_device


def join(rank: int, world_size: int, *, device: Literal["cpu", "cuda"], place: tuple[int, int] | None = None, **meeting: Any) -> Ranks:
    """Choose the device of the only rank, which meets nobody; `meeting` says where it would, and `place` is as in DeepSpeed's `join`."""
    del meeting
    if world_size != 1:
        raise LearnerError(f"PyTorch alone trains on one rank, and there are {world_size}; use --learner-backend deepspeed")
    return Ranks(rank, world_size, choose_device(device, (place or (rank, 1))[0]), owner=False)
