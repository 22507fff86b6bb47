"""Environments that call the model themselves: the user's `Executor`, and the `Policy` that it is given for that."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from agentrl.core.errors import EnvLoadError
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import Generation, Prompt, Task
from agentrl.env.agent import SamplingParams, StepResult
from agentrl.env.boundary import EnvLimits, EnvSession
from agentrl.env.results import bad_result, check_step, number
from agentrl.env.threads import Threads

Outcome: TypeAlias = StepResult | float

Sampler: TypeAlias = Callable[[GenerationRequest], Awaitable[Generation]]
"""Samples one turn, as `agentrl.core.protocols.Engine.generate`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """The model's answer to one call; it is trained on exactly as it is here.

    Attributes:
        prompt_ids: Token ids that the model was given. # [P]
        token_ids: Token ids that it sampled, its end token included. # [T]
        logprobs: Log-probability of each of them when it was sampled. # [T]
        versions: Policy version that sampled each of them. # [T]
        text: The sampled text without the end token.
        finish_reason: ``stop`` or ``length``.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float] = field(repr=False)
    versions: Sequence[int] = field(repr=False)
    text: str
    finish_reason: str

    @property
    def ids(self) -> list[int]:
        """Prompt and sampled tokens: what the next prompt begins with, if the conversation goes on."""
        return [*self.prompt_ids, *self.token_ids]


class Policy(ABC):
    """The policy, for the length of one episode: what is sampled through it is recorded and trained on."""

    @property
    @abstractmethod
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Tokens that prompt and completion of a call may have together."""

    @property
    @abstractmethod
    def sampling(self) -> SamplingParams:
        """A copy of the settings that the command line asks for."""

    @abstractmethod
    async def generate(self, prompt_ids: Sequence[int], sampling: Mapping[str, Any] | None = None) -> Completion:
        """Sample one continuation. Calls may overlap.

        A prompt that begins with all tokens of an earlier call, sampled ones included, goes on with that conversation; any
        other begins a new branch of the episode.

        Args:
            prompt_ids: The whole context. # [P]
            sampling: Settings to change for this call, as in `SamplingParams`.

        Raises:
            ContextLengthError: If the prompt leaves no room for one token.
            EngineError: If the engine failed, or the episode is over.
            EnvResultError: If an argument cannot be used.
        """

    @abstractmethod
    def discard(self, completion: Completion) -> None:
        """Leave a completion out of training, for example one that was sampled and not used."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of text as it is; control tokens spelled in it count."""

    @abstractmethod
    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a first prompt: messages by the chat template, text as ``--apply-chat-template`` says."""

    @abstractmethod
    def encode_next(self, messages: Prompt, after: Completion) -> list[int]:
        """Token ids to append to ``after.ids``: the end of the turn if it was cut, the messages, the head of the next turn."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, control tokens included."""


class Executor:
    """One object is one episode that calls the model itself: made without arguments, executed once, closed.

    Example:
        >>> class TwoDrafts(Executor):
        ...     async def execute(self, task, llm):
        ...         prompt = llm.encode_prompt(task.prompt)
        ...         first = await llm.generate(prompt, {"max_tokens": 32})
        ...         second = await llm.generate(first.ids + llm.encode_next("Better?", first))
        ...         return float(task.label in second.text)
    """

    @classmethod
    def tasks(cls) -> Iterable[Task] | None:
        """The tasks to train on; `None` if they come from ``--prompts``."""
        return None

    async def execute(self, task: Task, llm: Policy) -> Outcome:
        """Play the episode, within ``--episode-timeout-s``.

        Args:
            task: The task; every member of a group gets the same one.
            llm: The policy.

        Returns:
            The reward of the episode, or a `StepResult` with reward, score, info, reward_parts and truncated.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method async execute(self, task, llm)")

    def close(self) -> Awaitable[None] | None:
        """Release what the episode holds; always called, also after a failure."""
        return None


class CallerSession(EnvSession):
    """One episode of a class that calls the model itself: made and played under deadlines, on a thread of its own if it is no coroutine."""

    def __init__(self, cls: type[Any], source: str, limits: EnvLimits) -> None:
        # A thread of its own: one of those that all episodes share would be held for as long as the model answers.
        self._own_threads = Threads(1)
        super().__init__(cls, source, self._own_threads, limits)

    async def make(self) -> None:
        """Make the user's object; raises as `EnvSession.reset` does."""
        self._stopwatch.begin()
        self._object = await self._call("__init__", self._class, self._limits.reset_timeout_s, True)

    async def close(self) -> None:
        """As `EnvSession.close`."""
        await super().close()
        self._own_threads.close()


class ExecutorSession(CallerSession):
    """One episode of an `Executor`."""

    defaults = (Executor.close,)

    async def execute(self, task: Task, llm: Policy, timeout_s: float) -> StepResult:
        """Make the user's object and play; raises as `EnvSession.reset` does."""
        await self.make()
        return self._checked("execute", check_outcome, await self._method("execute", timeout_s, task, llm))


def check_outcome(value: Any, where: str) -> StepResult:
    """Check and normalise the result of `execute`: a number, or a `StepResult` with reward, score, info, reward_parts, truncated."""
    if not isinstance(value, StepResult):
        return StepResult(number(value, where, "reward"), terminated=True)
    for name in ("observation", "sampling", "images", "agent", "rewards", "scores"):
        if getattr(value, name):
            raise bad_result(where, name, getattr(value, name), "has no meaning at the end of an executor's episode")
    # Ended for the check, which wants an observation for an episode that goes on.
    return replace(check_step(replace(value, terminated=True), where), terminated=not value.truncated)


def check_executor(flag: str, spec: str, cls: type[Executor]) -> type[Executor]:
    """Refuse an executor without an `execute` of its own, or with a plain one, which could not wait for the model."""
    if cls.execute is Executor.execute:
        raise EnvLoadError(flag, spec, f"class {cls.__name__} has no method execute", "Add async def execute(self, task, llm).")
    if not inspect.iscoroutinefunction(cls.execute):
        raise EnvLoadError(flag, spec, f"{cls.__name__}.execute is a plain def", "Write async def: it has to wait for llm.generate.")
    return cls
