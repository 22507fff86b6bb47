"""``gym:ID?option=value&...``: the class that it stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agentrl.core.errors import EnvLoadError
from agentrl.env.adapters.gymnasium import GymEnv
from agentrl.env.adapters.gymnasium_vector import GymVectorEnv
from agentrl.env.adapters.specs import split_spec
from agentrl.env.adapters.toy_text import TOY_TEXT

OWN_OPTIONS = ("num_tasks", "max_invalid", "invalid_reward")
VECTOR_OPTIONS = ("num_envs", "vectorization_mode", "straggler_s")


def load_gym(spec: str) -> type[GymEnv]:
    """The class for ``gym:ID`` or ``gym:ID?option=value&...``.

    Options are keyword arguments of the environment, or attributes of `GymEnv`: ``num_tasks``, ``max_invalid``,
    ``invalid_reward``; with ``num_envs``, those of `GymVectorEnv`. Values are read as Python literals, else as text.

    Raises:
        EnvLoadError: If gymnasium has no such environment, or it does not take such an option.
    """
    env_id, options = split_spec(spec)
    own: dict[str, Any] = {key: options.pop(key) for key in OWN_OPTIONS if key in options}
    name = re.sub(r"\W", "_", env_id.rpartition("/")[2].rpartition(":")[2].partition("-v")[0])
    base = TOY_TEXT.get(name, GymEnv)
    bases: tuple[type[GymEnv], ...] = (base,)
    if "num_envs" in options:
        bases = (GymVectorEnv, base) if base is not GymEnv else (GymVectorEnv,)
        own.update((key, options.pop(key)) for key in VECTOR_OPTIONS if key in options)
    cls = type(name or "GymEnv", bases, {"env_id": env_id, "env_options": options, "__module__": base.__module__, **own})
    _try(spec, cls, own)
    return cls


def _try(spec: str, cls: type[GymEnv], own: Mapping[str, Any]) -> None:
    """Make one environment, so that a wrong name or option is known before anything heavy is started."""
    for key, value in own.items():
        least = 1 if key in ("num_tasks", "num_envs") else 0
        if key == "vectorization_mode":
            if value not in ("sync", "async"):
                raise EnvLoadError("--agent", spec, f"{key} = {value!r} is unknown", "Give sync or async.")
        elif not isinstance(value, int | float) or (key != "invalid_reward" and value < least) or (key == "num_envs" and value % 1):
            raise EnvLoadError("--agent", spec, f"{key} = {value!r} is out of range", "Give a number.")
    try:
        cls().make().close()
    except Exception as error:  # gymnasium's own errors, and whatever the environment's constructor raises
        remedy = "Give gym:ID?option=value, for example gym:FrozenLake-v1?is_slippery=False."
        raise EnvLoadError("--agent", spec, f"gymnasium.make raised {type(error).__name__}: {error}", remedy) from error
