"""Agents that talk to the model over HTTP, as they do in production: the user's `BlackBoxAgent`, and the address that it is given."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from agentrl.core.errors import EnvLoadError
from agentrl.core.process import LOOPBACK
from agentrl.core.types import Task
from agentrl.env.agent import StepResult
from agentrl.env.boundary import EnvLimits
from agentrl.env.executor import CallerSession, check_outcome
from agentrl.env.isolation.system import ProcessLimits
from agentrl.env.results import bad_result, number

AgentOutcome: TypeAlias = StepResult | float | Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEndpoint:
    """Address of the model for one episode: OpenAI's Chat Completions and Responses, and Anthropic's Messages.

    Attributes:
        root: Address of the server: ``http://127.0.0.1:PORT``, or as ``--endpoint-host`` and ``--endpoint-url`` say.
        api_key: Key of this episode; after the episode it is refused.
        model: Name of the model; the endpoint takes any other name too.
        max_model_len: Tokens that a conversation may have, by which programs plan their compaction; 0 if that is unknown.
    """

    root: str
    api_key: str
    model: str = "policy"
    max_model_len: int = 0

    @property
    def base_url(self) -> str:
        """Address for clients of OpenAI's APIs."""
        return f"{self.root}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """Address for clients of Anthropic's API."""
        return self.root

    def branch(self, name: str) -> ModelEndpoint:
        """The same model for a part of the agent that has a name, which `BlackBoxAgent.run` may give a reward of its own.

        Raises:
            ValueError: If the name is empty or holds anything but letters, digits, ``_`` and ``-``.
        """
        # `isalnum` accepts the letters of every script, and the name travels in a header, which is ASCII.
        if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
            raise ValueError(f"name = {name!r}: must consist of letters, digits, _ and -")
        # A branch of a branch belongs to the episode: the name behind the key is replaced, not extended.
        return replace(self, api_key=f"{self.api_key.partition(':')[0]}:{name}")

    def env(self) -> dict[str, str]:
        """Environment variables that SDKs and programs read, to be added to those of a process."""
        # Programs would send requests for loopback to a proxy of the environment, which is another machine. Some read the variable in
        # capitals, others in small letters.
        return {
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_MODEL": self.model,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_MODEL": self.model,
            "NO_PROXY": f"{LOOPBACK},localhost",
            "no_proxy": f"{LOOPBACK},localhost",
        }

    def openai(self, *, sync: bool = False, **options: Any) -> Any:
        """Return an ``openai.AsyncOpenAI``, or with `sync` an ``openai.OpenAI``, made with these `options`; needs the package openai."""
        import openai

        return _client(openai, "OpenAI", sync, options, base_url=self.base_url, api_key=self.api_key)

    def anthropic(self, *, sync: bool = False, **options: Any) -> Any:
        """Return an ``anthropic.AsyncAnthropic``, or with `sync` an ``anthropic.Anthropic``; needs the package anthropic."""
        import anthropic

        return _client(anthropic, "Anthropic", sync, options, base_url=self.anthropic_base_url, api_key=self.api_key)


class BlackBoxAgent:
    """One object is one episode of a program that talks to the model over HTTP: made without arguments, run once, closed.

    Example:
        >>> class Capital(BlackBoxAgent):
        ...     @classmethod
        ...     def tasks(cls):
        ...         return [Task("What is the capital of France?", label="Paris")]
        ...
        ...     async def run(self, task, llm):
        ...         async with llm.openai() as client:
        ...             question = [{"role": "user", "content": task.prompt}]
        ...             answer = await client.chat.completions.create(model=llm.model, messages=question)
        ...         return float(task.label in answer.choices[0].message.content)
    """

    @classmethod
    def tasks(cls) -> Iterable[Task] | None:
        """The tasks to train on; `None` if they come from ``--prompts``."""
        return None

    def run(self, task: Task, llm: ModelEndpoint) -> AgentOutcome | Awaitable[AgentOutcome]:
        """Run the agent once, within ``--episode-timeout-s``; a plain ``def`` runs on a thread of its own and may block.

        Args:
            task: The task; every member of a group gets the same one.
            llm: Address and key of the model; everything sampled there is recorded and trained.

        Returns:
            The reward of the episode; a `StepResult` with reward, score, info, reward_parts, rewards and truncated; or a dictionary of
            rewards by name of a branch (see `ModelEndpoint.branch`) or by id of an answer (the ``id`` in the model's response).
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method run(self, task, llm)")

    def close(self) -> Awaitable[None] | None:
        """Release what the episode holds; always called, also after a failure."""
        return None


def _client(package: Any, name: str, sync: bool, options: Mapping[str, Any], **address: str) -> Any:
    """A client of an SDK; on loopback it needs neither a proxy nor certificates, whose loading takes 80 ms per client."""
    prefix = "" if sync else "Async"
    if "http_client" not in options and urlsplit(address["base_url"]).hostname == LOOPBACK:
        options = {**options, "http_client": getattr(package, f"Default{prefix}HttpxClient")(verify=False, trust_env=False)}
    return getattr(package, prefix + name)(**address, **options)


class BlackBoxSession(CallerSession):
    """One episode of a `BlackBoxAgent`; `process` limits the programs that it starts."""

    defaults = (BlackBoxAgent.close,)

    def __init__(self, cls: type[Any], source: str, limits: EnvLimits, process: ProcessLimits | None = None) -> None:
        self._process = process
        super().__init__(cls, source, limits)

    async def run(self, task: Task, llm: ModelEndpoint, timeout_s: float) -> StepResult:
        """Make the user's object and run it; raises as `EnvSession.reset` does."""
        await self.make()
        if self._process is not None and hasattr(self._class, "process_limits"):
            self._object.process_limits = self._process
        return self._checked("run", check_agent_outcome, await self._method("run", timeout_s, task, llm))


def check_agent_outcome(value: Any, where: str) -> StepResult:
    """Check and normalise the result of `BlackBoxAgent.run`; rewards by branch or answer are in `StepResult.rewards`."""
    if not isinstance(value, StepResult | Mapping):
        return check_outcome(value, where)
    rewards = value if isinstance(value, Mapping) else value.rewards
    if not isinstance(rewards, Mapping) or (isinstance(value, Mapping) and not rewards):
        raise bad_result(where, "rewards", rewards, "must be a dictionary of rewards by name of a branch or id of an answer")
    checked = {str(name): number(reward, where, f"rewards[{name!r}]") for name, reward in rewards.items()}
    outcome = StepResult(0.0) if isinstance(value, Mapping) else replace(value, rewards={})
    return replace(check_outcome(outcome, where), rewards=checked)


def check_black_box(flag: str, spec: str, cls: type[BlackBoxAgent]) -> type[BlackBoxAgent]:
    """Refuse an agent without a `run` of its own."""
    if cls.run is BlackBoxAgent.run:
        raise EnvLoadError(flag, spec, f"class {cls.__name__} has no method run", "Add def run(self, task, llm) or async def run.")
    return cls
