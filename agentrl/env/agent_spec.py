"""Specification of an agent's class, which every process of a run loads by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import CodeType, FunctionType
from typing import Any

from agentrl.core.errors import EnvLoadError
from agentrl.env.agent import AgentClass
from agentrl.env.black_box import BlackBoxAgent
from agentrl.env.executor import Executor
from agentrl.env.given import PREFIX, from_bytes, to_bytes

FLAG = "--agent"
IMAGES = ("images", "image", "image_url")


class AgentKind(StrEnum):
    """Kinds of agents, by which code asks the model for an answer."""

    STEPS = "steps"  # the episode loop, between `reset` and `step`
    EXECUTOR = "executor"  # user code, through `Policy`
    BLACK_BOX = "black box"  # user code, over HTTP

    @property
    def calls_model(self) -> bool:
        """True if user code asks, which then runs in the rollout worker."""
        return self is not AgentKind.STEPS


def kind_of(cls: AgentClass) -> AgentKind:
    """The kind of a user's class."""
    if issubclass(cls, Executor):
        return AgentKind.EXECUTOR
    return AgentKind.BLACK_BOX if issubclass(cls, BlackBoxAgent) else AgentKind.STEPS


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """Place of an environment's class: specification with absolute path and name, folder of modules, name, file for messages.

    Another process can load it too; its pickle includes a class that is in no file.

    Attributes:
        loader: Function of a module that returns the class for `spec` and `root`; it lies above this package, as it knows all suites.
    """

    spec: str
    root: str
    name: str
    source: str
    loader: Callable[[str, str], AgentClass]

    def load(self) -> AgentClass:
        """Return the class; loaded once per process."""
        return self.loader(self.spec, self.root)

    @property
    def kind(self) -> AgentKind:
        """Kind of the class."""
        return kind_of(self.load())

    @property
    def shows_images(self) -> bool:
        """True if the code of the class hands over images, as far as that can be read."""
        cls = self.load()
        own = [owner for owner in cls.__mro__ if not owner.__module__.startswith(("agentrl.", "builtins"))]
        waiting = [getattr(value, "__func__", value) for owner in own for value in vars(owner).values()]
        seen: set[int] = set()
        while waiting:
            function = waiting.pop()
            if not isinstance(function, FunctionType) or id(function) in seen:
                continue
            seen.add(id(function))
            if _hands_over_images(function.__code__):
                return True
            # Functions of the same file are read too, as they may make its tasks.
            named = (function.__globals__.get(name) for name in function.__code__.co_names)
            waiting += [each for each in named if getattr(each, "__module__", "") == function.__module__]
        return getattr(cls, "observe", "") == "pixels"

    def __reduce__(self) -> tuple[Callable[..., AgentSpec], tuple[Any, ...]]:
        """Pickle by value a class that the other process cannot import."""
        data = to_bytes(self.spec) if self.spec.startswith(PREFIX) else b""
        return _unpickled, (self.spec, self.root, self.name, self.source, self.loader, data)


def _hands_over_images(code: CodeType) -> bool:
    """Return True if a function, or one inside it, has an argument or a part of a message for images among its constants."""
    constants = code.co_consts
    names = {name for each in constants if isinstance(each, tuple) for name in each if isinstance(name, str)}
    names |= {each for each in constants if isinstance(each, str) and each != "image"}  # a word that any text may have
    return not names.isdisjoint(IMAGES) or any(_hands_over_images(each) for each in constants if isinstance(each, CodeType))


def _unpickled(spec: str, root: str, name: str, source: str, loader: Callable[[str, str], AgentClass], data: bytes) -> AgentSpec:
    if data:
        from_bytes(spec, data)
    return AgentSpec(spec, root, name, source, loader)


def preload(agent: AgentSpec, methods: Sequence[str] = ("preload", "prepare")) -> AgentClass:
    """Load the user's class, and have it load what its episodes share.

    Args:
        agent: The class.
        methods: Its class methods that do so: `preload`, and `prepare`, which may take minutes, as it builds images.
    """
    cls = agent.load()
    for name in methods:
        if callable(load := getattr(cls, name, None)):
            try:
                load()
            except Exception as error:
                problem = f"{cls.__name__}.{name} raised {type(error).__name__}: {error}"
                raise EnvLoadError(FLAG, agent.spec, problem, "Correct it.") from error
    return cls
