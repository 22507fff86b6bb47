"""The user's interface: `AgentInstance`, and the arguments and results of its methods.

Two forms are accepted, by every method, in any mix. The typed form returns `ResetResult` and `StepResult`, and its
observations are chat messages. The dictionary form is the one OpenRLHF's agents use; its observations are raw text that
is appended to the context as it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, cast

from agentrl.core.types import Message, Prompt, Task

AgentClass: TypeAlias = type[Any]
"""A class whose objects have `step`, and perhaps `reset` and `close`; not necessarily an `AgentInstance`."""


class SamplingParams(dict[str, Any]):
    """Sampling settings of the next turn, as keys and as attributes.

    It is a copy: changing it has no effect until it is returned, whole or in part, from `reset` or `step`.
    Keys, named as in requests to OpenAI and vLLM: ``temperature``, ``top_p``, ``top_k``, ``max_tokens`` (the flag is ``--max-new-tokens``),
    ``stop``, ``stop_token_ids``, ``seed``.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no sampling setting {name!r}; there are {', '.join(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class ResetState(dict[str, Any]):
    """Argument of `reset`: a dictionary whose entries are also attributes."""

    @property
    def task(self) -> Task:
        """The task of this episode; every member of a group gets the same one."""
        return cast("Task", self["task"])

    @property
    def observation(self) -> Prompt:
        """The task's prompt: text or chat messages."""
        return cast("Prompt", self["observation"])

    @property
    def label(self) -> Any:
        """The task's label."""
        return self["label"]

    @property
    def seed(self) -> int:
        """Seed for the environment: the task's own, else one derived from the run's seed; the same in a whole group."""
        return cast("int", self["seed"])


class StepState(dict[str, Any]):
    """Argument of `step`: a dictionary whose entries are also attributes."""

    @property
    def task(self) -> Task:
        """The task of this episode."""
        return cast("Task", self["task"])

    @property
    def label(self) -> Any:
        """The task's label."""
        return self["label"]

    @property
    def action_text(self) -> str:
        """Text of the model in this turn, without its end token."""
        return cast("str", self["action_text"])

    @property
    def observation_text(self) -> str:
        """All text that the agent has read and written before this turn, control tokens included."""
        return cast("str", self["observation_text"])

    @property
    def agent(self) -> str:
        """Name of the agent that wrote it; "" in an environment that names none."""
        return cast("str", self["agent"])

    @property
    def turn(self) -> int:
        """Number of this turn in the episode, from 0; the turns of all agents are counted together."""
        return cast("int", self["turn"])

    @property
    def turns_left(self) -> int:
        """Turns that ``--max-turns`` leaves after this one; at 0 the episode ends now, with what it has earned."""
        return cast("int", self["turns_left"])

    @property
    def finish_reason(self) -> str:
        """Reason for the end of sampling: ``stop`` (the model ended its turn) or ``length`` (its token budget was used up)."""
        return cast("str", self["finish_reason"])

    @property
    def sampling_params(self) -> SamplingParams:
        """A copy of the settings this turn was sampled with."""
        return cast("SamplingParams", self["sampling_params"])


@dataclass(frozen=True, slots=True)
class ResetResult:
    """Result of `reset`.

    Attributes:
        observation: First prompt of the model: text (one user message) or chat messages; `None`: the task's prompt.
        info: Numbers to log.
        sampling: Sampling settings to change for the first turn and those after it.
        images: Images in any form that a task's may have, added to the task's.
        agent: Name of the agent that acts first and sees the observation; `None`: the first of the class's `agents`.
        observations: Agent -> what it sees before anything else: text or chat messages.
        state_key: Name of the state that the first turn begins in, for ``gigpo``; `None`: what the model reads before the turn.
    """

    observation: Prompt | None = None
    info: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    sampling: Mapping[str, Any] | None = field(default=None, kw_only=True)
    images: Sequence[Any] = field(default=(), kw_only=True)
    agent: str | None = field(default=None, kw_only=True)
    observations: Mapping[str, Prompt] = field(default_factory=dict, kw_only=True)
    state_key: str | int | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of `step`.

    Attributes:
        reward: Reward of this turn; the episode's reward is the sum over its turns.
        observation: Next prompt of the model: text (one user message) or chat messages. Not needed at the end.
        terminated: The episode is over.
        truncated: The episode is cut short before it is over; its reward so far counts.
        score: Success in 0..1, for filtering and evaluation; `None`: the reward so far, clipped to 0..1.
        info: Numbers to log; the mean over the steps that logged them is kept.
        sampling: Sampling settings to change for the turns that follow.
        reward_parts: Named components of the reward, for logs and for ``gdpo``; summed over the turns.
        images: Images that belong to the observation, in any form that a task's may have.
        agent: Name of the agent that acts next and sees the observation; `None`: the one after the agent that acted, in `agents`.
        rewards: Agent -> reward, for any agents; each is added to what the agent's last turn is worth.
        scores: Agent -> score, for agents other than the one that acted.
        state_key: Name of the state that the next turn begins in, for ``gigpo``; `None`: what the model reads before that turn.
        step_rewards: Rewards of steps within the turn, added to `reward`: pairs of the number of characters of the turn's ``action_text``
            up to the end of a step, and what the step is worth.
    """

    reward: float = 0.0
    observation: Prompt | None = None
    terminated: bool = field(default=False, kw_only=True)
    truncated: bool = field(default=False, kw_only=True)
    score: float | None = field(default=None, kw_only=True)
    info: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    sampling: Mapping[str, Any] | None = field(default=None, kw_only=True)
    reward_parts: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    images: Sequence[Any] = field(default=(), kw_only=True)
    agent: str | None = field(default=None, kw_only=True)
    rewards: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    scores: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    state_key: str | int | None = field(default=None, kw_only=True)
    step_rewards: Sequence[tuple[int, float]] = field(default=(), kw_only=True)


ResetReturn: TypeAlias = ResetResult | Mapping[str, Any] | None
StepReturn: TypeAlias = StepResult | Mapping[str, Any]


def has_snapshots(cls: AgentClass) -> bool:
    """Return True if objects of a class can hand their episode on to another object; see `AgentInstance.snapshot`."""
    own = [getattr(cls, name, None) for name in ("snapshot", "restore")]
    # The base class has both methods too, and they only raise, so that being callable is not enough.
    return all(callable(method) for method in own) and not {AgentInstance.snapshot, AgentInstance.restore} & set(own)


class AgentInstance:
    """One object is one episode: made without arguments, reset once, stepped after every turn, closed at the end.

    Methods may be ``def`` or ``async def``. Plain ones run on threads of their own, so they may block.

    Attributes:
        agents: Names of the agents, if several take turns in an episode; each has a conversation and a trajectory of its own.
        trained_agents: Those that are trained; empty: all. The others play with the same weights.

    Example:
        >>> class Echo(AgentInstance):
        ...     @classmethod
        ...     def tasks(cls):
        ...         return [Task("Say hi.", label="hi")]
        ...
        ...     def step(self, state):
        ...         return StepResult(float(state.action_text == state.label), terminated=True)
    """

    agents: ClassVar[Sequence[str]] = ()
    trained_agents: ClassVar[Sequence[str]] = ()

    @classmethod
    def preload(cls) -> None:
        """Load what all episodes share; called once before the first of a rollout worker."""

    @classmethod
    def tasks(cls) -> Iterable[Task] | None:
        """The tasks to train on: a finite collection is shuffled and repeated, an endless iterable is taken in order.

        Returns:
            The tasks, or `None` if they come from ``--prompts``.
        """
        return None

    @classmethod
    def eval_tasks(cls) -> Iterable[Task] | None:
        """Other tasks, to evaluate on and never to train on.

        Returns:
            The tasks, or `None` if they come from ``--eval-prompts``, or from `tasks` with ``--eval-size``.
        """
        return None

    def reset(self, state: ResetState, /) -> ResetReturn | Awaitable[ResetReturn]:
        """Begin the episode.

        Returns:
            A `ResetResult`, ``{"observation": text}``, or `None` for the task's prompt as it is.
        """
        return None

    def step(self, state: StepState, /) -> StepReturn | Awaitable[StepReturn]:
        """Judge what the model wrote and answer it.

        Returns:
            A `StepResult`, or a dictionary with ``rewards``, ``scores``, ``environment_feedback``, ``done``,
            ``sampling_params``, ``extra_logs`` and ``environment_images``, of which only ``rewards`` is needed.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method step(self, state)")

    def close(self) -> Awaitable[None] | None:
        """Release what the episode holds; always called, also after a failure."""
        return None

    def snapshot(self) -> Any:
        """Return the state of the episode, for ``--branch-at``; optional, with `restore`.

        It is called between two turns, once for each episode that goes on from there. What it returns must share nothing that changes
        with this object: `copy.deepcopy` of what `reset` and `step` set is the simple way.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method snapshot(self)")

    def restore(self, snapshot: Any, /) -> Awaitable[None] | None:
        """Go on with an episode of another object, in place of `reset`: the next call is `step`.

        With the same actions, it must give what the other object would give.

        Args:
            snapshot: What `snapshot` returned there.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method restore(self, snapshot)")


__all__ = ["AgentInstance", "Message", "ResetResult", "ResetState", "SamplingParams", "StepResult", "StepState", "Task"]
