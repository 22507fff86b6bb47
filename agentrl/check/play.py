"""Episodes without a model: the same boundary, prompts and states as in a run, with actions that are given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from agentrl.check.probe import Watch
from agentrl.core.errors import EnvError, EnvResultError
from agentrl.core.types import Message, Prompt, Task
from agentrl.env.agent import AgentClass, SamplingParams, StepResult, StepState
from agentrl.env.boundary import EnvLimits, EnvSession, Threads
from agentrl.env.multi_agent import MultiAgentSpec, multi_agent_spec
from agentrl.env.results import NEEDS_ONE, bad_result


class Codec(Protocol):
    """Between prompts and tokens, as the model's chat template has it."""

    end_token_ids: tuple[int, ...]

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of the first prompt."""
        ...

    def encode_next(self, messages: Sequence[Message], last_id: int) -> list[int]:
        """Token ids of the environment's answer to a turn."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Token ids of text as it is."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        ...

    def control_in(self, text: str) -> str:
        """The first control token that is spelled in a text, or ""."""
        ...


@dataclass(frozen=True, slots=True)
class View:
    """What a policy sees.

    Attributes:
        task: Of the episode.
        turn: From 0.
        text: What the environment said last.
        first: What it said first.
        rng: For policies that draw.
        index: Number of the episode with this policy.
    """

    task: Task
    turn: int
    text: str
    first: str
    rng: Random
    index: int


@dataclass(frozen=True, slots=True)
class Policy:
    """Writes a turn.

    Attributes:
        name: For reports.
        act: From what is seen to what is written.
    """

    name: str
    act: Callable[[View], str]


SOLVER = Policy("solve", lambda view: "")
"""Writes what the environment's own `solve` says."""


def solves(cls: AgentClass) -> bool:
    """Whether a class says what a right answer is."""
    return callable(getattr(cls, "solve", None))


class SolvingSession(EnvSession):
    """A session that can be asked for a right answer."""

    async def solve(self, state: StepState) -> str:
        """What the environment's `solve` writes.

        Raises:
            EnvError: If it raised.
            EnvTimeoutError: If it took longer than a step may.
            EnvResultError: If it is not text.
        """
        value = await self._method("solve", self._limits.step_timeout_s, state)
        if not isinstance(value, str):
            raise bad_result(self._where("solve"), "result", value, "must be text")
        return value


@dataclass(slots=True)
class PlayedTurn:
    """One turn: what was written, what came of it, and what is read next, with its tokens; is it an agent's first prompt?"""

    action: str
    result: StepResult
    text: str
    num_tokens: int
    opens: bool = False

    @property
    def reward(self) -> float:
        """What it earned, for all agents together."""
        return math.fsum((self.result.reward, *self.result.rewards.values()))


@dataclass(slots=True)
class Played:
    """One episode so far.

    Attributes:
        task: It is about.
        seed: It was reset with.
        policy: Who played.
        first: What the model would see first, as text.
        raw_first: Whether that is raw text, as the dictionary form gives it.
        first_tokens: Its tokens.
        turns: In order.
        error: What ended it before its time.
        method: During which that was.
    """

    task: Task
    seed: int
    policy: str = ""
    first: str = ""
    raw_first: bool = False
    first_tokens: int = 0
    turns: list[PlayedTurn] = field(default_factory=list)
    error: EnvError | None = None
    method: str = ""

    @property
    def finished(self) -> bool:
        """Whether the environment said that it is over."""
        return bool(self.turns) and self.turns[-1].result.terminated

    @property
    def over(self) -> bool:
        """Whether there can be no further turn."""
        return self.error is not None or (bool(self.turns) and (self.finished or self.turns[-1].result.truncated))

    @property
    def reward(self) -> float:
        """Sum of the turns' rewards."""
        return math.fsum(turn.reward for turn in self.turns)

    @property
    def score(self) -> float:
        """As an episode of a run has it."""
        given = self.turns[-1].result.score if self.turns else None
        return min(max(self.reward, 0.0), 1.0) if given is None else given

    def steps(self) -> list[tuple[Any, ...]]:
        """What can be compared of every turn: observation, reward, terminated, truncated, score."""
        return [(turn.text, turn.reward, turn.result.terminated, turn.result.truncated, turn.result.score) for turn in self.turns]


class Episode:
    """One episode that is stepped by hand; a failure is noted in `played`, not raised."""

    def __init__(self, session: SolvingSession, codec: Codec, agents_spec: MultiAgentSpec, played: Played) -> None:
        self._session, self._codec, self._agents_spec, self.played = session, codec, agents_spec, played
        self._agent = agents_spec.agents[0]
        self._texts: dict[str, str] = {}  # agent -> all that it has read and written
        self._openings: Mapping[str, Prompt] = {}

    async def reset(self) -> None:
        """Begin."""
        played = self.played
        try:
            result = await self._session.reset(played.task, played.seed)
            self._openings = result.observations
            self._agent = result.agent or self._agent
            played.raw_first = isinstance(result.observation, str)
            played.first, played.first_tokens = self._tell(self._agent, result.observation)
        except EnvError as error:
            played.error, played.method = error, "reset"

    async def solve(self) -> str:
        """What the environment itself would write now; "" if it fails, which is noted."""
        try:
            return await self._session.solve(self._state(""))
        except EnvError as error:
            self.played.error, self.played.method = error, "solve"
            return ""

    async def step(self, action: str) -> None:
        """Take a turn."""
        played = self.played
        try:
            result = await self._session.step(self._state(action))
            self._texts[self._agent] = self._texts.get(self._agent, "") + action
            known = set(self._texts)
            text, size = self._hand_over(result)
        except EnvError as error:
            played.error, played.method = error, "step"
            return
        played.turns.append(PlayedTurn(action, result, text, size, opens=set(self._texts) != known))

    def _state(self, action: str) -> StepState:
        played = self.played
        return StepState(
            observation_text=self._texts.get(self._agent, ""),
            action_text=action,
            label=played.task.label,
            sampling_params=SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=128, stop=[], stop_token_ids=[]),
            task=played.task,
            agent=self._agent,
            turn=len(played.turns),
            finish_reason="stop",
        )

    async def close(self) -> None:
        """End it."""
        await self._session.close()

    def _hand_over(self, result: StepResult) -> tuple[str, int]:
        """Tell the agent that is next; text and tokens of what it is told."""
        if result.terminated or result.truncated:
            return ("" if result.observation is None else plain(result.observation)), 0
        self._agent = result.agent or self._agents_spec.after(self._agent)
        if self._agent in self._texts and result.observation is None:
            raise bad_result(f"{self._agents_spec.env}.step", "observation", None, f"agent {self._agent!r} acts next; {NEEDS_ONE}")
        return self._tell(self._agent, result.observation)

    def _tell(self, agent: str, observation: Prompt | None) -> tuple[str, int]:
        """What an agent reads before its turn, as text, and its number of tokens."""
        first = agent not in self._texts
        opening = self._openings.get(agent) if first else None
        parts = [part for part in (opening, observation) if part is not None] or [self.played.task.prompt]
        ids = [token for part in parts for token in (self._codec.encode_prompt(part) if first else self._answer(part))]
        self._texts[agent] = self._texts.get(agent, "") + self._codec.decode(ids)
        return "\n".join(map(plain, parts)), len(ids)

    def _answer(self, observation: Prompt) -> list[int]:
        if isinstance(observation, str):
            return self._codec.encode_text(observation)
        return self._codec.encode_next(observation, self._codec.end_token_ids[0] if self._codec.end_token_ids else -1)


@dataclass(frozen=True, slots=True)
class Player:
    """Plays episodes of one environment.

    Attributes:
        cls: The user's class, behind a probe.
        source: File it is defined in.
        codec: Of the model's tokenizer.
        threads: For plain methods.
        limits: Deadlines.
        max_turns: Turns of an episode.
        seed: Of the check.
        watch: Gets the name of what is being done.
    """

    cls: AgentClass
    source: str
    codec: Codec
    threads: Threads
    limits: EnvLimits
    max_turns: int
    seed: int
    watch: Watch

    def open(self, task: Task, seed: int, policy: str = "") -> Episode:
        """An episode that is not begun."""
        session = SolvingSession(self.cls, self.source, self.threads, self.limits)
        return Episode(session, self.codec, multi_agent_spec(self.cls, self.source), Played(task, seed, policy))

    async def play(self, task: Task, policy: Policy, *, seed: int, index: int = 0, max_turns: int = 0) -> Played:
        """One episode from beginning to end."""
        episode = self.open(task, seed, policy.name)
        played = episode.played
        rng = Random(f"{self.seed} {policy.name} {task.id} {index}")
        try:
            await episode.reset()
            while not played.over and len(played.turns) < (max_turns or self.max_turns):
                text = played.turns[-1].text if played.turns else played.first
                view = View(task, len(played.turns), text, played.first, rng, index)
                action = await episode.solve() if policy is SOLVER else policy.act(view)
                if played.error is None:
                    await episode.step(action)
        finally:
            await episode.close()
        return played


def plain(value: Prompt) -> str:
    """Text of a prompt or of an observation."""
    if isinstance(value, str):
        return str(value)
    contents = (message.get("content") for message in value)
    return "\n".join(content if isinstance(content, str) else "" if content is None else str(content) for content in contents)


def refused_by_template(error: EnvError) -> bool:
    """Whether it was the model's chat template that could not take an observation."""
    return isinstance(error, EnvResultError) and "chat template" in str(error)
