"""Skips tests of what this machine does not have: marks `linux` and `vllm`, and the reason that the report gives."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from agentrl.core.operating_system import SYSTEM, on_linux

MISSING = {
    "linux": "" if on_linux() else f"needs Linux, and this is {SYSTEM}",
    "vllm": "" if find_spec("vllm") else "needs vLLM, which is not installed",
}
"""Mark -> why this machine cannot run its tests; empty if it can."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests whose marks, or the values of whose parameters, name something that is missing."""
    for item in items:
        values = getattr(getattr(item, "callspec", None), "params", {}).values()
        for mark, reason in MISSING.items():
            if reason and (item.get_closest_marker(mark) or mark in [value for value in values if isinstance(value, str)]):
                item.add_marker(pytest.mark.skip(reason=reason))
