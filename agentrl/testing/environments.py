"""The contract of environments and rewards, as ``agentrl check`` knows it."""

from __future__ import annotations

from typing import Any

from agentrl.api.commands import check
from agentrl.testing.running import require


def check_environment(env: object, *, warnings: bool = False, **settings: Any) -> None:
    """Play an environment or a reward without a model, as ``agentrl check`` does, and raise what is wrong with it.

    Args:
        env: As for `agentrl.train`: a class, a function, or ``"file.py:Name"``.
        warnings: Raise also what trains, but probably not as meant.
        **settings: The flags of ``agentrl check``: ``episodes=16``, ``budget_s=60``.

    Raises:
        AssertionError: With each rule that is broken, where, and the remedy.
        ConfigError: If the environment cannot be loaded.
    """
    result = check(env, **settings)
    found = [*result.errors, *(result.warnings if warnings else ())]
    require(not found, "\n".join(f"{finding}\n    {finding.rule.remedy}" for finding in found))
