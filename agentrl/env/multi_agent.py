"""The agents of an environment by name, as the user's class lists them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.core.errors import EnvLoadError

RESERVED = ("mean", "std", "unfiltered_mean")
"""Names that would hide another metric of the form ``reward/<name>``."""

RENDERED, STAND_IN = "openrlhf.utils.agent.AgentInstanceBase", "stands_in_for"
"""Base class of agents whose `reset` is given a rendered prompt, and the attribute by which another class takes its place."""

_NAME = re.compile(r"[A-Za-z]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiAgentSpec:
    """The agents of an environment in order of rotation ("" for a single one), those trained, and file and class for messages.

    If `rendered`, `reset` is given a prompt as the chat template renders it, as OpenRLHF's agents expect.
    """

    agents: tuple[str, ...] = ("",)
    trained: frozenset[str] = frozenset({""})
    env: str = ""
    rendered: bool = False

    @property
    def several(self) -> bool:
        """True if the environment names its agents, even a single one."""
        return self.agents != ("",)

    def after(self, agent: str) -> str:
        """Return the agent that acts after `agent`, if the environment does not say."""
        return self.agents[(self.agents.index(agent) + 1) % len(self.agents)]


def named_agents(cls: type[Any]) -> tuple[str, ...]:
    """The names in the class attribute `agents`; empty for a single-agent environment."""
    return tuple(getattr(cls, "agents", ()) or ())


def multi_agent_spec(cls: type[Any], source: str = "") -> MultiAgentSpec:
    """Return the agents that a class (which passed `check_agents`) names in `agents`, and of these `trained_agents`, or all of them."""
    env = f"{os.path.basename(source)}: {cls.__name__}"
    agents = named_agents(cls)
    rendered = any(RENDERED in (f"{base.__module__}.{base.__name__}", vars(base).get(STAND_IN)) for base in cls.__mro__)
    if not agents:
        return MultiAgentSpec(env=env, rendered=rendered)
    trained = frozenset(getattr(cls, "trained_agents", ()) or agents)
    return MultiAgentSpec(agents=agents, trained=trained, env=env, rendered=rendered)


def check_agents(flag: str, spec: str, cls: type[Any]) -> None:
    """Refuse class attributes `agents` and `trained_agents` that are no lists of distinct names, or train an agent that does not exist."""
    agents = _names(flag, spec, cls, "agents")
    trained = _names(flag, spec, cls, "trained_agents")
    for name in agents:
        if not _NAME.fullmatch(name) or name in RESERVED:
            remedy = f"Use letters, digits and underscores, and none of {', '.join(RESERVED)}."
            raise EnvLoadError(flag, spec, f"{cls.__name__}.agents has {name!r}, which cannot be an agent's name", remedy)
    unknown = [name for name in trained if name not in agents]
    if unknown:
        problem = f"{cls.__name__}.trained_agents has {unknown[0]!r}, which is none of its agents"
        raise EnvLoadError(flag, spec, problem, f"Its agents are {', '.join(agents) or 'not named: set the class attribute agents'}.")


def _names(flag: str, spec: str, cls: type[Any], attribute: str) -> tuple[str, ...]:
    value = getattr(cls, attribute, ())
    names = value if isinstance(value, Sequence) and not isinstance(value, str) else None
    if names is None or not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        problem = f"{cls.__name__}.{attribute} = {value!r} is no list of distinct names"
        raise EnvLoadError(flag, spec, problem, f'Write {attribute} = ("buyer", "seller"), for example.')
    return tuple(names)
