"""OpenRLHF's agent classes by their own names, so that files written for it load where it is not installed.

https://github.com/OpenRLHF/OpenRLHF, module ``openrlhf.utils.agent``.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from agentrl.core.errors import EnvLoadError
from agentrl.env.agent import AgentInstance, ResetState

EXECUTOR_BASES = ("AgentExecutorBase", "MultiTurnAgentExecutor", "SingleTurnAgentExecutor")
_ORIGINAL = "openrlhf.utils.agent"


class AgentInstanceBase(AgentInstance):
    """Base of agents with several turns."""

    async def reset(self, states: ResetState, /, **kwargs: Any) -> Any:
        """The prompt as it is."""
        return states


class AgentExecutorBase:
    """Base of executors that have an `execute` of their own."""

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        """What an override may not call: episodes of the executors below do not run through it."""
        problem = "the execute of OpenRLHF's own executors does not exist here"
        raise NotImplementedError(f"{problem}; write out what it does with llm_engine.generate, or leave execute as it is")


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Names the class whose objects are the episodes."""

    def __init__(self, agent_instance_cls: type[Any]) -> None:
        self.agent_instance_cls = agent_instance_cls


class SingleTurnAgentExecutor(AgentExecutorBase):
    """Names what judges the only turn: the address of one server or several, or `reward_func`."""

    def __init__(self, remote_rm_url: str | list[str] | None = None) -> None:
        self.reward_endpoints = [remote_rm_url] if isinstance(remote_rm_url, str) else list(remote_rm_url or [])
        self.reward_func: Any = None


@contextmanager
def importable() -> Iterator[None]:
    """While this lasts, ``import openrlhf.utils.agent`` finds the classes above, unless the package is installed."""
    if "openrlhf" in sys.modules or importlib.util.find_spec("openrlhf") is not None:
        yield
        return
    modules = _modules()
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)


def is_executor(value: Any) -> bool:
    """Whether it is a class that inherits from one of OpenRLHF's executors, ours or the original's."""
    bases = value.__mro__[1:] if inspect.isclass(value) else ()
    return any(base.__name__ in EXECUTOR_BASES and base.__module__ in (__name__, _ORIGINAL) for base in bases)


def is_instance(cls: type[Any]) -> bool:
    """Whether a class inherits from OpenRLHF's `AgentInstanceBase`, ours or the original."""
    return any(base.__name__ == "AgentInstanceBase" and base.__module__ in (__name__, _ORIGINAL) for base in cls.__mro__)


def own_execute(cls: type[Any]) -> type[Any] | None:
    """The class whose `execute` it uses, if that is none of OpenRLHF's own."""
    definer = next((base for base in cls.__mro__ if "execute" in vars(base)), None)
    return None if definer is None or definer.__module__ in (__name__, _ORIGINAL) else definer


def make_executor(flag: str, spec: str, cls: type[Any]) -> Any:
    """An executor, made without arguments.

    Raises:
        EnvLoadError: If that fails.
    """
    try:
        return cls()
    except Exception as error:
        problem = f"{cls.__name__}() raised {type(error).__name__}: {error}"
        remedy = "Give it an __init__(self) that needs no arguments; of a MultiTurnAgentExecutor it calls super().__init__(AgentInstance)."
        raise EnvLoadError(flag, spec, problem, remedy) from error


def executor_parts(flag: str, spec: str, cls: type[Any]) -> tuple[type[Any] | None, Any]:
    """What an executor stands for: the class of its episodes, or what judges its single turn.

    Returns:
        The class and `None`, or `None` and the reward: a function, or a list of server addresses or files.

    Raises:
        EnvLoadError: If it cannot be made without arguments, or names nothing.
    """
    executor = make_executor(flag, spec, cls)
    instance, function = getattr(executor, "agent_instance_cls", None), getattr(executor, "reward_func", None)
    reward = function if function is not None else getattr(executor, "reward_endpoints", None)
    if not isinstance(instance, type) and not reward:
        problem = f"{cls.__name__} names neither an agent class nor a reward"
        raise EnvLoadError(flag, spec, problem, "Call super().__init__(AgentInstance) in its __init__.")
    return (instance, None) if isinstance(instance, type) else (None, reward)


def _modules() -> dict[str, ModuleType]:
    names = ("openrlhf", "openrlhf.utils", _ORIGINAL, "openrlhf.utils.logging_utils")
    modules = {name: ModuleType(name, "Stands in for OpenRLHF, which is not installed.") for name in names}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    modules["openrlhf"].__path__ = modules["openrlhf.utils"].__path__ = []
    for cls in (AgentInstanceBase, AgentExecutorBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor):
        setattr(modules[_ORIGINAL], cls.__name__, cls)
    vars(modules["openrlhf.utils.logging_utils"])["init_logger"] = logging.getLogger
    return modules
