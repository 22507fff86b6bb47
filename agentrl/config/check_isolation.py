"""Rules between the settings of environments in processes of their own."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable

from agentrl.config.schema import IsolationConfig, TrainConfig
from agentrl.core.errors import ConfigError


def _limits_have_processes(config: TrainConfig) -> None:
    if config.isolation.env_isolation != "none":
        return
    for item in dataclasses.fields(IsolationConfig):
        value = getattr(config.isolation, item.name)
        if value != item.default:
            flag = f"--{item.name.replace('_', '-')}"
            raise ConfigError(flag, value, "has no effect on environments in the rollout worker", "Add --env-isolation process.")


def _processes_can_be_held(config: TrainConfig) -> None:
    if config.isolation.env_isolation == "process" and sys.platform != "linux":
        raise ConfigError("--env-isolation", "process", f"needs Linux, and this is {sys.platform}", "Leave it out, or use a container.")


def _passed_are_names(config: TrainConfig) -> None:
    for name in config.isolation.env_pass:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ConfigError("--env-pass", name, "is not the name of an environment variable", "Give names only, not values.")


ISOLATION_RULES: tuple[Callable[[TrainConfig], None], ...] = (_limits_have_processes, _processes_can_be_held, _passed_are_names)
