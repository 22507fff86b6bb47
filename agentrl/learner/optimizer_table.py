"""Optimizers: what a setting, a rule, a memory plan and the learner know of each. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias

OptimizerName: TypeAlias = Literal["adamw", "muon", "adafactor", "adamw_8bit"]
"""Values of ``--optimizer``, which are the keys of `OPTIMIZERS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """Facts of an optimizer.

    Attributes:
        state_bytes: Bytes of its state for each element of a matrix in a layer.
        outside_bytes: The same outside of the layers: embeddings and output layer.
        whole: It needs whole matrices, of which ZeRO 1 to 3 give it flattened parts.
        betas: It has the two decay rates of Adam.
        package: Package that it comes from; empty: torch.
    """

    state_bytes: int
    outside_bytes: int
    whole: bool = False
    betas: bool = True
    package: str = ""


OPTIMIZERS: Mapping[str, OptimizerFacts] = MappingProxyType(
    {
        "adamw": OptimizerFacts(state_bytes=8, outside_bytes=8),
        "muon": OptimizerFacts(state_bytes=4, outside_bytes=8, whole=True),
        "adafactor": OptimizerFacts(state_bytes=0, outside_bytes=0, whole=True, betas=False),
        "adamw_8bit": OptimizerFacts(state_bytes=2, outside_bytes=8, package="bitsandbytes"),
    }
)
"""The optimizers; `agentrl.learner.optimizers` makes them."""


class OptimizerSettings(Protocol):
    """Settings that an optimizer is made of, in reinforcement learning and on given data alike."""

    @property
    def optimizer(self) -> OptimizerName:
        """Name in `OPTIMIZERS`."""

    @property
    def learning_rate(self) -> float:
        """Peak learning rate."""

    @property
    def weight_decay(self) -> float:
        """Decay of matrices; vectors do not decay."""

    @property
    def adam_betas(self) -> tuple[float, float]:
        """Decay rates of the moments of Adam."""

    @property
    def zero_stage(self) -> int:
        """DeepSpeed ZeRO stage, 0 to 3."""


BETAS = (0.9, 0.95)
"""Default decay rates of Adam."""
