"""OpenRLHF's agent classes and graders by their own names, so that files written for it load where it is not installed.

https://github.com/OpenRLHF/OpenRLHF, module ``openrlhf.utils.agent``.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from agentrl.core.errors import EnvLoadError
from agentrl.env.agent import AgentInstance, ResetState
from agentrl.env.rewards import verifiers

EXECUTOR_BASES = ("AgentExecutorBase", "MultiTurnAgentExecutor", "SingleTurnAgentExecutor")
_ORIGINAL = "openrlhf.utils.agent"


class AgentInstanceBase(AgentInstance):
    """Base of agents with several turns."""

    stands_in_for = f"{_ORIGINAL}.AgentInstanceBase"

    async def reset(self, states: ResetState, /, **kwargs: Any) -> Any:
        """The prompt as it is."""
        return states


class AgentExecutorBase:
    """Base of executors that have an `execute` of their own."""

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Must be overridden."""
        raise NotImplementedError(f"{type(self).__name__} needs a method async execute(self, prompt, label, sampling_params, ...)")


PLAY: ContextVar[Callable[[type[Any] | None, str, Any, Any, int, Any], Awaitable[dict[str, Any]]]] = ContextVar("PLAY")
"""Plays an episode of a class with prompt, label, sampling settings, tokens that it may have, and engine; set for each `execute`."""


class PlayingExecutor(AgentExecutorBase):
    """Plays an episode in `environment` (`None` if nothing judges it); an override may call its `execute` and change the result."""

    environment: type[Any] | None = None

    async def execute(
        self, prompt: str, label: Any, sampling_params: Any, max_length: int, hf_tokenizer: Any, llm_engine: Any, images: Any = None
    ) -> dict[str, Any]:
        """One episode: tokens, the ranges of sampled ones, reward, scores and logs."""
        return await PLAY.get()(self.environment, prompt, label, sampling_params, max_length, llm_engine)


class MultiTurnAgentExecutor(PlayingExecutor):
    """Names the class whose objects are the episodes."""

    def __init__(self, agent_instance_cls: type[Any]) -> None:
        self.agent_instance_cls = agent_instance_cls


class SingleTurnAgentExecutor(PlayingExecutor):
    """Names what judges the only turn: the address of one server or several, or `reward_func`."""

    def __init__(self, remote_rm_url: str | list[str] | None = None) -> None:
        self.reward_endpoints = [remote_rm_url] if isinstance(remote_rm_url, str) else list(remote_rm_url or [])
        self.reward_func: Any = None


def extract_boxed_answer(solution: str | None) -> str | None:
    r"""Return the contents of the last ``\boxed{...}`` of a text, `None` if none is complete."""
    text = solution or ""
    start = text.rfind("\\boxed{")
    depth = 0
    for place in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : place].strip()
    return None


def grade_answer(given_answer: str | None, ground_truth: Any) -> bool:
    """Return True if two answers are equal as text or as mathematics."""
    if given_answer is None or ground_truth is None:
        return False
    return verifiers.exact_match(given_answer, ground_truth) or verifiers.math_equal(f"${given_answer}$", ground_truth)


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
    """Return True for a class that inherits from an executor of OpenRLHF or from agentrl's replacement."""
    bases = value.__mro__[1:] if inspect.isclass(value) else ()
    return any(base.__name__ in EXECUTOR_BASES and base.__module__ in (__name__, _ORIGINAL) for base in bases)


def own_execute(cls: type[Any]) -> type[Any] | None:
    """The class whose `execute` it uses, if that is none of OpenRLHF's own."""
    definer = next((base for base in cls.__mro__ if "execute" in vars(base)), None)
    return None if definer is None or definer.__module__ in (__name__, _ORIGINAL) else definer


def make_executor(flag: str, spec: str, cls: type[Any]) -> Any:
    """Return an executor, made without arguments; `EnvLoadError` if that fails."""
    try:
        return cls()
    except Exception as error:
        problem = f"{cls.__name__}() raised {type(error).__name__}: {error}"
        remedy = "Give it an __init__(self) that needs no arguments; of a MultiTurnAgentExecutor it calls super().__init__(AgentInstance)."
        raise EnvLoadError(flag, spec, problem, remedy) from error


def executor_parts(executor: Any) -> tuple[type[Any] | None, Any]:
    """Return the class for an executor's episodes and `None`, or `None` and its reward: a function, or a list of servers or files."""
    instance, function = getattr(executor, "agent_instance_cls", None), getattr(executor, "reward_func", None)
    if isinstance(instance, type):
        return instance, None
    return None, function if function is not None else getattr(executor, "reward_endpoints", None)


def _modules() -> dict[str, ModuleType]:
    names = ("openrlhf", "openrlhf.utils", _ORIGINAL, "openrlhf.utils.logging_utils")
    modules = {name: ModuleType(name, "Stands in for OpenRLHF, which is not installed.") for name in names}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    # With a path a module is a package, which `import` needs in order to go on behind the dot.
    modules["openrlhf"].__path__ = modules["openrlhf.utils"].__path__ = []
    for cls in (AgentInstanceBase, AgentExecutorBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor):
        setattr(modules[_ORIGINAL], cls.__name__, cls)
    vars(modules["openrlhf.utils"]).update(extract_boxed_answer=extract_boxed_answer, grade_answer=grade_answer)
    vars(modules["openrlhf.utils.logging_utils"])["init_logger"] = logging.getLogger
    return modules
