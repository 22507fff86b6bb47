"""Sending of weights from the learner to engines, independent of the transport."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeAlias

from torch import Tensor

from agentrl.core.protocols import WeightUpdate

NamedTensors: TypeAlias = Iterable[tuple[str, Tensor]]
"""Checkpoint names and tensors; a tensor needs to be valid only until the next one is asked for."""


class WeightSender(Protocol):
    """Publishes one version after the other; the next `send` comes only after every engine has loaded the last.

    Attributes:
        every_rank: Whether every learner rank calls `send`, or the first alone.
    """

    every_rank: bool

    def send(self, named_tensors: NamedTensors, version: int) -> WeightUpdate:
        """Take a copy of the weights and say how engines get them.

        The caller may change the weights as soon as this returns. Where bytes move only while engines receive, they do so
        on a thread of the sender.

        Raises:
            WeightSyncError: If the weights cannot be offered, or the version before did not get through.
        """
        ...

    def close(self) -> None:
        """Release what is held for engines; safe to call twice."""
