"""Episodes without a model: the episode loop of a run, with an engine that writes the tokens of a scripted policy."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeAlias

from agentrl.check.findings import CheckSettings
from agentrl.check.probe import Watch, probed
from agentrl.config.sections import changed
from agentrl.core.errors import EngineError, EnvError, NotScoredError
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import Generation, GroupRequest, Prompt, Sampling, Task
from agentrl.env.agent import AgentClass, StepState
from agentrl.env.agent_spec import AgentSpec
from agentrl.env.boundary import EnvSession
from agentrl.env.images import image_text
from agentrl.env.multi_agent import MultiAgentSpec, multi_agent_spec
from agentrl.env.plan import ImageConfig
from agentrl.env.results import bad_result
from agentrl.env.threads import Threads
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.episode import Episode
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.forks import Role
from agentrl.rollout.image_urls import ImageFetcher
from agentrl.rollout.images import decoded, image_bytes
from agentrl.rollout.observers import ResetEvent, SampleEvent, SamplerEngine, StepEvent, WatchedSession, written_turn
from agentrl.rollout.template import plain_text

CLOSE_TIMEOUT_S = 10.0
"""Deadline of `close`, as in a run."""

Gate: TypeAlias = Callable[[], Awaitable[object]]
"""Waited for before each turn."""

UNLIMITED = 2**31
"""Context length: how long prompts and observations are is judged from what was seen, and cuts no episode."""


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """Everything that a scripted policy may look at."""

    task: Task
    turn: int  # from 0
    text: str  # that the environment gave last
    first: str  # that the environment gave first
    rng: Random
    index: int  # of the episode with this policy


@dataclass(frozen=True, slots=True)
class TextPolicy:
    """Writes turns by a rule, in place of a model; a turn of `None` leaves the episode there."""

    name: str
    act: Callable[[PolicyInput], str | None]


SOLVER = TextPolicy("solve", lambda given: "")
"""Writes the right answer, as the environment's own `solve` gives it."""


def repeating(actions: list[str]) -> TextPolicy:
    """A policy that writes given texts and then leaves the episode."""
    return TextPolicy("again", lambda given: actions[given.turn] if given.turn < len(actions) else None)


class SolvingSession(EnvSession):
    """A session that can be asked for a right answer."""

    async def solve(self, state: StepState) -> str:
        """Return the text of the environment's `solve`; an `EnvError` if it raised, took longer than a step may, or returned no text."""
        value = await self._method("solve", self._limits.step_timeout_s, state)
        if not isinstance(value, str):
            raise bad_result(self._where("solve"), "result", value, "must be text")
        return value


@dataclass(slots=True)
class CheckedTurn:
    """One turn of a checked episode."""

    action: str
    result: Any
    text: str  # read next
    num_tokens: int = 0  # of that text; 0 if no turn reads it
    opens: bool = False  # it is the first prompt of another agent
    agent: str = ""  # that wrote the action

    @property
    def rewards(self) -> dict[str, float]:
        """Reward of the turn for each agent that it is given to."""
        own = self.result.reward + self.result.rewards.get(self.agent, 0.0)
        return {**self.result.rewards, self.agent: own}

    @property
    def scores(self) -> dict[str, float]:
        """Score of each agent that is given one."""
        return {**self.result.scores, **({} if self.result.score is None else {self.agent: self.result.score})}


@dataclass(slots=True)
class CheckedEpisode:
    """One episode so far."""

    task: Task
    policy: str = ""
    first: str = ""
    raw_first: bool = False  # the first text is raw, as the dictionary form gives it
    first_tokens: int = 0
    turns: list[CheckedTurn] = field(default_factory=list)
    error: EnvError | None = None
    method: str = "reset"  # in which the failure happened
    agents: tuple[str, ...] = ("",)
    images: tuple[str, int] | None = None  # method that first gave some to the model, and how many
    pictures: list[str] = field(default_factory=list)  # a hash of each, in the order in which they were shown
    unreadable: str = ""  # problem of the first of them that cannot be read

    @property
    def good(self) -> bool:
        """True if nothing failed, and a turn was taken."""
        return self.error is None and bool(self.turns)

    @property
    def finished(self) -> bool:
        """True if the environment ended the episode."""
        return bool(self.turns) and self.turns[-1].result.terminated

    @property
    def over(self) -> bool:
        """True if there can be no further turn."""
        return self.error is not None or (bool(self.turns) and (self.finished or self.turns[-1].result.truncated))

    @property
    def actions(self) -> list[str]:
        """Texts that `step` was given."""
        return [turn.action for turn in self.turns]

    @property
    def rewards(self) -> dict[str, float]:
        """Sum of the turns' rewards for each agent."""
        return {agent: math.fsum(turn.rewards.get(agent, 0.0) for turn in self.turns) for agent in self.agents}

    @property
    def reward(self) -> float:
        """Reward of the episode; with several agents, the mean of theirs."""
        return math.fsum(self.rewards.values()) / len(self.agents)

    @property
    def scores(self) -> dict[str, float]:
        """Last score of each agent; without one its reward, clipped to 0..1."""
        last = self.turns[-1].scores if self.turns else {}
        return {agent: float(last.get(agent, min(max(reward, 0.0), 1.0))) for agent, reward in self.rewards.items()}

    @property
    def score(self) -> float:
        """Score of the episode; with several agents, the mean of theirs."""
        return math.fsum(self.scores.values()) / len(self.agents)

    def values(self) -> list[dict[str, Any]]:
        """Return the values to compare with those of another episode, in JSON's own types: of `reset`, then of each turn."""
        values: list[dict[str, Any]] = [{"first": self.first}]
        for turn in self.turns:
            reward, result = turn.rewards if any(self.agents) else turn.result.reward, turn.result
            flags = {"terminated": result.terminated, "truncated": result.truncated, "score": result.score}
            values.append({"observation": turn.text, "reward": reward, **flags})
        return values


class TextEpisode:
    """One episode of the loop of a run in which a scripted policy takes the place of the model; `played` is the episode so far."""

    def __init__(
        self,
        player: Player,
        task: Task,
        policy: TextPolicy,
        *,
        index: int = 0,
        max_turns: int = 0,
        gate: Gate | None = None,
        role: Role | None = None,
    ) -> None:
        self._player, self._policy, self._index, self._gate = player, policy, index, gate
        self._rng = Random(f"{player.settings.seed} {policy.name} {task.id} {index}")
        self.played = CheckedEpisode(task, policy.name, agents=player.agents_spec.agents)
        self._session = SolvingSession(player.cls, player.source, player.threads, player.settings.env)
        self._episode = Episode(
            GroupRequest(group_id=0, task=task, n_samples_per_prompt=1, version=0),
            0,
            engine=SamplerEngine(self._sample, max_model_len=UNLIMITED),
            codec=player.codec,
            env=WatchedSession(self._session, self._watch),
            settings=changed(player.settings, max_turns=max_turns) if max_turns else player.settings,
            agents_spec=player.agents_spec,
            role=role,
        )
        self._role = role
        self._openings: Mapping[str, Prompt] = {}
        self._agents: set[str] = set()  # those that have read something
        self._readers: list[frozenset[str]] = []  # the same before each turn
        self._tokens: dict[str, int] = {}  # conversation -> tokens so far
        self._shown: dict[str, int] = {}  # conversation -> images so far

    async def run(self, root: TextEpisode | None = None) -> CheckedEpisode:
        """Play until the episode ends, fails, or is left by the policy; a failure is noted in `played`, not raised.

        An episode that goes on from a `root`, which is over, is played after that has parted.
        """
        try:
            await self._episode.wait_for_fork()
            if root is not None:
                self._go_on_from(root)
            await self._episode.play()
        except (EngineError, NotScoredError):  # the policy left, or no reward applies to its answer
            pass
        except EnvError as error:
            self.played.error = error
        finally:
            if self._role is not None and self._role.is_root:
                self._role.fork.end()
        return self.played

    def _go_on_from(self, root: TextEpisode) -> None:
        """Take over what was seen of another episode before this one parted from it."""
        count, theirs = self._episode.num_forked, root.played
        # Copies, because the next prompt writes its length into the last turn.
        turns = [replace(turn) for turn in theirs.turns[:count]]
        self.played = replace(self.played, first=theirs.first, raw_first=theirs.raw_first, first_tokens=theirs.first_tokens, turns=turns)
        self._openings, self._agents = root._openings, set(root._readers[count])

    async def close(self) -> None:
        """Close the environment."""
        await self._session.close()

    def _watch(self, event: ResetEvent | SampleEvent | StepEvent) -> None:
        played, spec = self.played, self._player.agents_spec
        if isinstance(event, ResetEvent):
            self._openings = event.result.observations
            played.raw_first = isinstance(event.result.observation, str)
            played.first = self._read(event.result.agent or spec.agents[0], event.result.observation)
        elif isinstance(event, StepEvent):
            result = event.result
            if result.terminated or result.truncated:
                text = "" if result.observation is None else plain(result.observation)
            else:
                text = self._read(result.agent or spec.after(event.state.agent), result.observation)
            played.turns.append(CheckedTurn(event.state.action_text, result, text, agent=event.state.agent))

    def _read(self, agent: str, observation: Prompt | None) -> str:
        """Text that an agent reads before its turn: its opening if it has read nothing so far, and the observation."""
        opening = None if agent in self._agents else self._openings.get(agent)
        self._agents.add(agent)
        parts = [part for part in (opening, observation) if part is not None]
        return "\n".join(map(plain, parts or [self.played.task.prompt]))

    async def _sample(self, request: GenerationRequest) -> Generation:
        """Return the tokens of the turn that the policy writes; an `EngineError` if it leaves the episode."""
        self._count(request)
        self._look(request)
        self._readers.append(frozenset(self._agents))
        if self._gate is not None:
            await self._gate()
        played = self.played
        if self._policy is SOLVER:
            played.method = "solve"
            text: str | None = await self._session.solve(self._episode.state())
        else:
            said = played.turns[-1].text if played.turns else played.first
            text = self._policy.act(PolicyInput(played.task, len(played.turns), said, played.first, self._rng, self._index))
        played.method = "step"
        if text is None:
            raise EngineError("the policy leaves the episode")
        generation = self._generation(text, request.sampling)
        self._tokens[request.session] += len(generation.token_ids)
        return generation

    def _look(self, request: GenerationRequest) -> None:
        """Note the images that are shown for the first time."""
        played, limits = self.played, self._player.settings.images
        if request.images and played.images is None:
            played.images = ("step" if played.turns else "reset", len(request.images))
        if len(request.images) > limits.max_images and not played.unreadable:
            played.unreadable = f"{len(request.images)} images are more than {limits.max_images} (--max-images)"
        for image in request.images[self._shown.get(request.session, 0) :]:
            digest, problem = look_at(image, limits)
            played.pictures.append(digest)
            played.unreadable = played.unreadable or problem
        self._shown[request.session] = len(request.images)

    def _count(self, request: GenerationRequest) -> None:
        """Note how many tokens are read before this turn."""
        played, known = self.played, self._tokens.get(request.session)
        fresh = len(request.prompt_ids) - (known or 0)
        self._tokens[request.session] = len(request.prompt_ids)
        if played.turns:
            played.turns[-1].num_tokens, played.turns[-1].opens = fresh, known is None
        else:
            played.first_tokens = fresh

    def _generation(self, text: str, sampling: Sampling) -> Generation:
        """A text as a model would write it: none of it a control token, and cut as the environment asks.

        The budget of the command line cuts nothing, because the texts are to try what the environment can take.
        """
        codec, own_budget = self._player.codec, self._player.settings.rollout.max_new_tokens
        ends = [text.index(stop) + len(stop) for stop in sampling.stop if stop in text]
        ids = codec.encode_plain(text[: min(ends)] if ends else text)
        if not ends:
            ids = [*ids, *codec.turn_end_ids]
        return written_turn(ids, len(ids) if sampling.max_tokens >= own_budget else sampling.max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """Plays episodes of one environment."""

    cls: AgentClass  # the user's, behind a probe
    source: str
    agents_spec: MultiAgentSpec
    codec: ChatCodec
    threads: Threads
    settings: EpisodePlan

    async def play(self, task: Task, policy: TextPolicy, *, index: int = 0, max_turns: int = 0) -> CheckedEpisode:
        """One episode from beginning to end."""
        episode = TextEpisode(self, task, policy, index=index, max_turns=max_turns)
        try:
            return await episode.run()
        finally:
            await episode.close()


def make_player(settings: CheckSettings, spec: AgentSpec, codec: ChatCodec, watch: Watch) -> Player:
    """Return a player of an environment; `watch` sees every call of user code."""
    cls = spec.load()
    rollout = replace(settings.rollout, reset_timeout_s=settings.check.timeout_s, step_timeout_s=settings.check.timeout_s)
    return Player(
        cls=probed(cls, watch),
        source=spec.source,
        agents_spec=multi_agent_spec(cls, spec.source),
        codec=codec,
        threads=Threads(rollout.env_threads),
        settings=EpisodePlan(
            seed=settings.run.seed,
            places=repr(settings.run),
            data=settings.data,
            rollout=rollout,
            endpoint=settings.endpoint,
            sandbox=settings.sandbox,
            close_timeout_s=min(settings.check.timeout_s, CLOSE_TIMEOUT_S),
            is_training=settings.ratios,
            weighs_ratios=settings.ratios,
        ),
    )


def plain(value: Prompt) -> str:
    """Text of a prompt or of an observation."""
    return str(value) if isinstance(value, str) else "\n".join(plain_text(message.get("content")) for message in value)


def look_at(image: Any, limits: ImageConfig) -> tuple[str, str]:
    """Return a hash of what an image shows, and why it cannot be read; "" if it can."""
    try:
        picture = decoded(image_bytes(image_text(image), ImageFetcher(limits.allow_image_urls)), limits.max_image_pixels)
    except (ValueError, OSError) as error:
        return repr(image)[:80], str(error)
    # The size is hashed too, because pictures of other shapes may have the same bytes.
    return hashlib.sha256(repr(picture.size).encode() + picture.tobytes()).hexdigest(), ""
