"""One episode: agents and environment take turns until it ends, a budget runs out, or something fails."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from agentrl.core.errors import EngineError, EnvError, EnvResultError, EnvTimeoutError, NotScoredError
from agentrl.core.metrics import average
from agentrl.core.protocols import Engine
from agentrl.core.types import (
    FinishReason,
    GroupRequest,
    Message,
    Prompt,
    Sampling,
    Span,
    Status,
    Task,
    Trajectory,
    Turn,
    as_messages,
    derive_seed,
)
from agentrl.env.agent import StepResult, StepState
from agentrl.env.multi_agent import MultiAgentSpec
from agentrl.env.results import NEEDS_ONE, bad_result
from agentrl.env.session import Session
from agentrl.env.states import make_sampling_params, make_step_state
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.codecs import encode_prompt
from agentrl.rollout.conversation import Conversation, with_places
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.forks import Fork, ForkPoint, Role
from agentrl.rollout.partners import Partner
from agentrl.rollout.penalties import penalize
from agentrl.rollout.recorder import Recorder


class Episode:
    """Runs member number `index` of a requested group in a step environment, once; closes the environment, whatever happens.

    Each agent has a conversation of its own; most environments have a single agent. Turns are counted over all agents, tokens for each
    conversation. The reward is the sum of the turns' rewards, less the penalties for length. A metric is the mean over the calls of `reset`
    and `step` that logged it, whoever acted. Without `seeded` the seeds are left to the engine.
    """

    def __init__(
        self,
        group_request: GroupRequest,
        index: int,
        *,
        engine: Engine,
        codec: ChatCodec,
        env: Session,
        settings: EpisodePlan,
        agents_spec: MultiAgentSpec = MultiAgentSpec(),  # noqa: B008
        sampling: Sampling | None = None,
        seeded: bool = True,
        partners: Mapping[str, Partner] = MappingProxyType({}),
        role: Role | None = None,
    ) -> None:
        self._role = role
        self._origin: ForkPoint | None = None  # where another episode parted, if this one goes on from there
        self._task, self._group_request, self._index = group_request.task, group_request, index
        self._codec, self._env, self._settings, self._agents_spec = codec, env, settings, agents_spec
        self._id = episode_id(group_request, index)
        self._agents = dict[str, Conversation]()
        for agent in agents_spec.agents:
            name, first = f"{self._id}-{agent}" if agent else self._id, agent == agents_spec.agents[0]
            seed_of = turn_seed(group_request, index, settings.seed, "" if first else agent) if seeded else _no_seed
            own, spoken = engine, codec
            if (partner := partners.get(agent)) is not None:
                own, spoken = partner.engine_for(partial(self._messages_of, agent), engine), partner.codec
            recorder = Recorder(name, engine=own, codec=spoken, settings=settings, seed_of=seed_of)
            self._agents[agent] = Conversation(recorder, sampling or settings.sampling)
        self.agent, self.number = agents_spec.agents[0], 0  # that acts now, and of its turn over all agents
        self._openings: Mapping[str, Prompt] = {}
        self._logs: list[Mapping[str, float]] = [partner.info for partner in partners.values()]
        self._start_s, self._spans = time.perf_counter(), list[Span]()
        self._called_s = 0.0  # begin of the environment's last call, from that of the episode
        self._overflowed, self._unread = False, dict[str, Turn | None]()
        self._shown: list[tuple[str, int, Any]] = []  # images of observations: agent, number of the turn, image

    async def run(self) -> tuple[Trajectory, ...]:
        """Run to the end.

        Consumes nothing, produces one trajectory per agent, waits for engine and environment; the environment's own deadlines
        and the episode's unblock it. Failures of user code and engine become a status; cancellation passes through. An episode that goes
        on from another one first waits for that to come to the turn, or to end; its times begin there.
        """
        await self.wait_for_fork()
        self._start_s = time.perf_counter()
        try:
            status, error = await guarded(self.play, self._close, self._settings.rollout.episode_timeout_s)
        finally:
            if self._role is not None and self._role.is_root:
                # Whatever happened: the other episodes of the fork wait for this one.
                self._role.fork.end()
        total_s = time.perf_counter() - self._start_s
        return self.trajectories(status, error, total_s)

    async def _close(self) -> None:
        """Close the environment; the tools within are noted with the last turn, and timed from its last call."""
        try:
            await self._env.close()
        finally:
            self._note_tools(self.number, self._called_s)

    async def wait_for_fork(self) -> None:
        """Wait until the episode that this one goes on from comes to the turn, or ends; others need not wait."""
        if self._role is not None and not self._role.is_root:
            self._go_on_from(await self._role.fork.point())

    async def play(self) -> Status:
        """The loop itself, without a deadline: reset or restore, then sample and step in turns; `run` is for everybody else."""
        if self._origin is None:
            await self._reset()
        else:
            await self._env.restore(self._origin.snapshots.pop(), self._task)
        for number in range(self.num_forked, self._settings.rollout.max_turns):
            self.number = number
            start = time.perf_counter()
            try:
                turn = await self._agents[self.agent].generate(number)
            finally:
                self._time("generate", start)
            if self._role is not None and self._role.is_root and self._role.fork.is_at(turn):
                await self._part(self._role.fork)
            result = await self._step(turn)
            if result.terminated:
                return Status.FINISHED
            if result.truncated or number + 1 == self._settings.rollout.max_turns:
                await self._cut(result)
                break
            await self._hand_over(result)
            if self._agents[self.agent].room < 1:
                self._overflowed = self._agents[self.agent].overflowed
                break
        return Status.TRUNCATED

    def state(self, turn: Turn | None = None) -> StepState:
        """Return the state for `step` after a sampled turn; without one, before anything is written."""
        conversation = self._agents[self.agent]
        codec = conversation.recorder.codec
        return make_step_state(
            observation_text=conversation.text + (conversation.prompt_text if turn is None else turn.prompt_text),
            action_text="" if turn is None else codec.decode_answer(turn.token_ids.tolist(), conversation.tools),
            sampling_params=make_sampling_params(conversation.sampling),
            task=self._task,
            agent=self.agent,
            turn=self.number,
            turns_left=self._settings.rollout.max_turns - self.number - 1,
            finish_reason=str(FinishReason.STOP if turn is None else turn.finish_reason),
        )

    def trajectories(self, status: Status, error: str | None = None, total_s: float = 0.0) -> tuple[Trajectory, ...]:
        """The trajectories of all agents, one each, as far as the episode was played; it ended with this status after `total_s` seconds."""
        generate_s = math.fsum(conversation.recorder.generate_s for conversation in self._agents.values())
        env_s = math.fsum(span.seconds for span in self._spans if span.name in ("reset", "step"))
        timings = {"generate_s": generate_s, "env_s": env_s, "total_s": total_s}
        return tuple(self._trajectory(agent, status, error, timings) for agent in self._agents_spec.agents)

    def _messages_of(self, agent: str) -> list[Message] | None:
        return self._agents[agent].messages

    @property
    def num_forked(self) -> int:
        """Turns that were another episode's."""
        return 0 if self._origin is None else self._origin.number

    def _go_on_from(self, point: ForkPoint | None) -> None:
        """Take over what was read and written up to a turn of another episode, if it came to that."""
        if point is None:
            return
        self._origin, self._task, self.agent, self._openings = point, point.task, point.agent, point.openings
        self._agents = {name: point.conversations[name].parted(own.recorder) for name, own in self._agents.items()}
        self._logs, self._shown = [*point.logs], [*point.shown]

    async def _part(self, fork: Fork) -> None:
        """Have the other episodes of a fork go on from before the turn that was sampled last."""
        snapshots = await self._env.snapshot(fork.others)
        fork.part(
            ForkPoint(
                episode_id=self._id,
                number=self.number,
                agent=self.agent,
                task=self._task,
                openings=self._openings,
                conversations={name: conversation.parted() for name, conversation in self._agents.items()},
                logs=tuple(self._logs),
                shown=tuple(self._shown),
                snapshots=snapshots,
            )
        )

    async def _reset(self) -> None:
        """Begin the episode."""
        task = self._task
        seed = task.seed if task.seed is not None else derive_seed(self._settings.seed, task.id, task.epoch)
        if self._agents_spec.rendered:
            task = self._task = self._rendered(task)
        start = time.perf_counter()
        try:
            result = await self._env.reset(self._task, seed)
        finally:
            self._time("reset", start)
        self.agent = agent = result.agent or self._agents_spec.agents[0]
        self._openings = result.observations
        self._logs.append(result.info)
        if result.sampling:
            where = f"{self._agents_spec.env}.reset"
            for conversation in self._agents.values():
                conversation.sampling = self._settings.changed_sampling(conversation.sampling, result.sampling, where)
        self._note(result.images, 0)
        self._agents[agent].state_key = result.state_key
        await self._begin(agent, result.observation, (*task.images, *result.images))

    def _rendered(self, task: Task) -> Task:
        """Return a task whose prompt is the text that the chat template writes, with the model's placeholder for each image."""
        chat = self._settings.data.apply_chat_template
        with self._naming("reset"):
            prompt, images = with_places(self._codec, as_messages(task.prompt) if chat and task.images else task.prompt, task.images)
        ids = encode_prompt(self._codec, prompt, apply_chat_template=chat)
        return replace(task, prompt=self._codec.decode(ids), images=tuple(images))

    async def _begin(self, agent: str, observation: Prompt | None, images: Sequence[Any]) -> None:
        """Give an agent its first prompt: its opening, and what it is told now; if there is neither, the task's prompt."""
        conversation, opening = self._agents[agent], self._openings.get(agent)
        told = self._group_request.task.prompt if observation is None else observation
        if (fewest := conversation.recorder.codec.fewest_tokens(told)) > conversation.recorder.limit:
            raise self._first_prompt_error(agent, f"{fewest} tokens or more")
        with self._naming("reset"):
            if opening is not None and observation is None:
                await conversation.begin(opening, images=images)
            else:
                await conversation.begin(told, _messages(opening), images)
        if not 1 <= (size := len(conversation.prompt)) <= conversation.recorder.limit - 1:
            raise self._first_prompt_error(agent, f"{size} tokens")

    def _first_prompt_error(self, agent: str, size: str) -> EnvError:
        whose, conversation = f" for agent {agent!r}" if agent else "", self._agents[agent]
        needs = f"it needs 1 to {conversation.recorder.limit - 1} ({conversation.recorder.limit_flag})"
        return EnvError(f"the first prompt of task {self._task.id!r}{whose} has {size}; {needs}")

    async def _hand_over(self, result: StepResult) -> None:
        """Make the next agent the acting one, and give it the observation."""
        self.agent = after = result.agent or self._agents_spec.after(self.agent)
        conversation = self._agents[after]
        if result.sampling:
            where = f"{self._agents_spec.env}.step (turn {self.number})"
            conversation.sampling = self._settings.changed_sampling(conversation.sampling, result.sampling, where)
        self._note(result.images, self.number + 1)
        conversation.state_key = result.state_key
        if not conversation.turns:
            await self._begin(after, result.observation, result.images)
        elif result.observation is None:
            raise bad_result(f"{self._agents_spec.env}.step", "observation", None, f"agent {after!r} acts next; {NEEDS_ONE}")
        else:
            with self._naming("step"):
                await conversation.read(result.observation, result.images)

    async def _cut(self, result: StepResult) -> None:
        """Keep what the next agent would have read, as far as it is in the midst of a conversation."""
        after = result.agent or self._agents_spec.after(self.agent)
        if self._settings.keeps_unread and result.observation is not None and self._agents[after].turns:
            with self._naming("step"):
                self._unread[after] = await self._agents[after].unread(result.observation, result.images)

    def _note(self, images: Sequence[Any], number: int) -> None:
        """Note images that the acting agent reads from the turn with this number on."""
        self._shown += [(self.agent, number, image) for image in images]

    async def _step(self, turn: Turn) -> StepResult:
        """Let the environment judge a turn, and record it."""
        conversation = self._agents[self.agent]
        start = time.perf_counter()
        try:
            state = self.state(turn)
            answer = str(state.action_text)  # before user code has the state
            result = await self._env.step(state)
        finally:
            self._time("step", start)
        conversation.settle(turn, result, answer, f"{self._agents_spec.env}.step (turn {self.number})")
        for name in {**result.rewards, **result.scores}:
            self._agents[name].earn(result.rewards.get(name, 0.0), result.scores.get(name))
        self._logs.append(result.info)
        return result

    @contextmanager
    def _naming(self, method: str) -> Iterator[None]:
        """Say in errors of the chat template whose messages it refuses."""
        try:
            yield
        except EnvResultError as error:
            raise EnvResultError(f"{self._agents_spec.env}.{method}, task {self._task.id!r}: {error}") from error

    def _time(self, name: str, start: float) -> None:
        """Note a part of the episode that began at this time of `perf_counter` and ends now, with the tools within it."""
        turn, begin_s = None if name == "reset" else self.number, start - self._start_s
        if name != "generate":
            self._called_s = begin_s
            self._note_tools(turn, begin_s)
        self._spans.append(Span(name, turn, begin_s, time.perf_counter() - start))

    def _note_tools(self, turn: int | None, begin_s: float) -> None:
        """Note the tools within the environment since its last call, which began so many seconds after the episode."""
        if tools := self._env.take_spans():
            self._spans += [replace(tool, turn=turn, start_s=begin_s + tool.start_s) for tool in tools]

    def _trajectory(self, agent: str, status: Status, error: str | None, timings: Mapping[str, float]) -> Trajectory:
        conversation, ended = self._agents[agent], status.trainable
        turns = conversation.recorder.turns
        if ended and turns:
            turns = penalize(turns, conversation.recorder.budgets, self._settings.penalty)
        reward = math.fsum(turn.reward for turn in turns) if turns else conversation.reward
        return Trajectory(
            trajectory_id=conversation.name,
            episode_id=self._id,
            group_id=self._group_request.group_id,
            turns=turns,
            status=status,
            reward=reward if ended else None,
            score=conversation.score if ended else None,
            agent=agent,
            frozen=agent not in self._agents_spec.trained,
            reward_parts=conversation.parts,
            metrics=average(self._logs),
            error=error,
            timings=timings,
            unanswered=conversation.unanswered,
            unread=self._unread.get(agent),
            messages=tuple(conversation.messages or ()),
            overflowed=self._overflowed and agent == self.agent,
            spans=tuple(self._spans),
            images=tuple((number, image) for whose, number, image in self._shown if whose == agent),
            forked_from="" if self._origin is None else self._origin.episode_id,
            forked_turns=self.num_forked,
        )


async def guarded(
    play: Callable[[], Awaitable[Status]], close: Callable[[], Awaitable[None]], timeout_s: float
) -> tuple[Status, str | None]:
    """Play an episode under its deadline, and close its environment whatever happens; return how it ended, and what went wrong.

    Failures of user code and engine are a status, other errors are bugs and raised.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await play(), None
    except EnvTimeoutError as raised:
        return Status.TIMEOUT, str(raised)
    except NotScoredError as raised:
        return Status.NOT_SCORED, str(raised)
    except EnvError as raised:
        return Status.ENV_ERROR, str(raised)
    except EngineError as raised:
        return Status.ENGINE_ERROR, f"{type(raised).__name__}: {raised}"
    except TimeoutError:
        # Not the deadline of the episode, so a bug that must not pass for an episode which took too long.
        if not limit.expired():
            raise
        return Status.TIMEOUT, f"the episode was not over after {timeout_s:g} s (--episode-timeout-s)"
    finally:
        await close()


def episode_id(group_request: GroupRequest, index: int) -> str:
    """Name of one member of a group: group, attempt and place in the group."""
    name = f"{group_request.group_id}-{group_request.attempt}-{index}"
    return f"{group_request.eval_sampling.name}-{name}" if group_request.eval_sampling else name


def turn_seed(group_request: GroupRequest, index: int, seed: int, agent: str = "") -> Callable[[int], int]:
    """The seed of each turn of a member of a group, by the turn's number.

    `agent` is "" for the first agent, whose seeds are those of an environment with a single agent.
    """
    task = group_request.task
    more = (*((group_request.attempt,) if group_request.attempt else ()), *((agent,) if agent else ()))
    return lambda number: derive_seed(seed, task.id, task.epoch, index, number, *more)


def _no_seed(number: int) -> None:
    """Leave the seed to the engine."""


def _messages(opening: Prompt | None) -> list[Message] | None:
    return None if opening is None or isinstance(opening, str) else list(opening)
