"""Environment variables that Ray reads: set before it is imported, and read again where something else has imported it before."""

from __future__ import annotations

import os
import secrets
import sys
from typing import Any

from agentrl.core.errors import ConfigError

TOKEN = secrets.token_hex(32)
"""Token of all private clusters of this process; who connects to one must have it."""


def set_environment(address: str) -> None:
    """Let Ray find the settings of a private cluster, or those of one to join at `address`.

    Raises:
        ConfigError: If this process is connected to a cluster already.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # every error is ours to tell; Ray would print a traceback before it
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")  # it would take SIGTERM away from the command line
    if not address:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = TOKEN
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # or Ray makes the machine's outer address of 127.0.0.1
    if "ray" in sys.modules:
        _read_again(address)


def _read_again(address: str) -> None:
    """Do what `ray.init` does itself when it turns authentication on, since Ray reads its settings once, when it is imported."""
    import ray
    from ray import _raylet
    from ray._private import ray_constants

    if ray.is_initialized():
        flag, value = ("--ray-address", address) if address else ("--runtime", "ray")
        remedy = "Call ray.shutdown() before, or start this run in a process of its own."
        raise ConfigError(flag, value, "this process is connected to a Ray cluster already", remedy)
    native: Any = _raylet  # compiled, without types
    native.Config.initialize("")
    native.AuthenticationTokenLoader.instance().reset_cache()
    if not address:
        ray_constants.ENABLE_RAY_CLUSTER = False  # else the cluster would listen on the machine's outer address
