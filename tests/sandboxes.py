"""Kinds of sandboxes that this machine holds, for tests that need one."""

from __future__ import annotations

import pytest

from agentrl.core.errors import SandboxError
from agentrl.env.sandbox.local import check_local


def problem() -> str:
    """Return the reason for which local sandboxes do not work here, "" if they do."""
    try:
        check_local()
    except SandboxError as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(problem()), reason=problem())
