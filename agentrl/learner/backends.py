"""Back-ends of the learner by name: what a setting, a rule, a memory plan and the learner know of each. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from agentrl.learner.optimizer_table import OPTIMIZERS

if TYPE_CHECKING:
    from agentrl.algo.plan import AlgoConfig

BackendName: TypeAlias = Literal["deepspeed", "torch"]
"""Values of ``--learner-backend``, which are the keys of `BACKENDS`."""
DEEPSPEED: BackendName = "deepspeed"

BACKENDS: Mapping[str, str] = MappingProxyType({"deepspeed": "agentrl.learner.deepspeed", "torch": "agentrl.learner.plain"})
"""Packages of the back-ends; `agentrl.learner.engine` says what is in one."""


class Rules(Protocol):
    """Rules between the settings of a back-end and others; `LearnerConfig` reads facts here, so its type has no name here."""

    def __call__(self, learner: Any, algo: AlgoConfig, lora: Any) -> None:
        """Raise a `ConfigError` for the first setting that has no effect, or excludes another."""


class Copies(Protocol):
    """Memory for further copies of one trained model on one rank."""

    def __call__(self, size: int, learner: Any, *, width: int) -> dict[str, float]:
        """Return bytes by what they hold; arguments as those of `States`."""


def _no_copies(size: int, learner: Any, *, width: int) -> dict[str, float]:
    del size, learner, width
    return {}


def _nowhere(learner: Any) -> tuple[str, ...]:
    del learner
    return ()


class States(Protocol):
    """Memory of one trained model on one rank."""

    def __call__(self, size: int, learner: Any, *, width: int, outside: int = 0) -> tuple[float, float, float]:
        """Return the bytes of parameters, gradients and optimizer.

        Args:
            size: Number of trained parameters.
            learner: Settings of the learner, a `LearnerConfig`.
            width: Bytes of a number that the learner computes with: 2 in bfloat16, with float32 master weights, or 4.
            outside: Those of the parameters that are outside of the layers: embeddings and output layer.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """Facts of a back-end, ``FACTS`` in its module ``plan``.

    Attributes:
        check: Rules of its settings.
        states: Memory that it takes.
        copies: Memory for further copies of what is trained.
        on_gpu: Tells which of its settings need a GPU, as they are given: ``deepcompile``.
        packages: Packages that it needs beside torch and transformers.
        divides: It trains on several ranks, and may divide models among them.
        float32: It trains in float32 only.
        defaults: Settings that it needs otherwise than their defaults; they are filled in unless given.
    """

    check: Rules
    states: States
    copies: Copies = _no_copies
    on_gpu: Callable[[Any], tuple[str, ...]] = _nowhere
    packages: tuple[str, ...] = ()
    divides: bool = True
    float32: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


def packages_of_backends() -> tuple[str, ...]:
    """Return the packages that back-ends need beside torch and transformers."""
    return tuple(dict.fromkeys(package for name in BACKENDS for package in facts_of_backend(name).packages))


def facts_of_backend(name: str) -> BackendFacts:
    """Return the facts of a back-end."""
    facts: BackendFacts = import_module(f"{BACKENDS[name]}.plan").FACTS
    return facts


def whole_states(size: int, optimizer: str, *, outside: int) -> tuple[float, float, float]:
    """Return the bytes of `States` for a rank that trains in float32 and divides nothing."""
    facts = OPTIMIZERS[optimizer]
    return size * 4, size * 4, (size - outside) * facts.state_bytes + outside * facts.outside_bytes
