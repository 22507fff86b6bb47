"""The plain object behind a rollout worker: one engine, and the episodes that run against it, no more at once than it can serve.

More episodes than the engine's cache can hold do not make it faster: requests wait in its queue, where the first turn of a new
group stands before the next turn of an old one, and the keys and values of old conversations are thrown out before their next
turn wants them. So whole groups are held back before they begin. Nothing that began is stopped, and what an episode samples does
not depend on when it begins, so a limit changes no result, only times.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentrl.core.errors import EngineDeadError, EngineError
from agentrl.core.process import collect_rarely, resident_mib
from agentrl.core.protocols import Engine, EngineLimits, EngineLoad, EngineStats, LoadSums, Memory, SleepingEngine, WeightUpdate
from agentrl.core.scoring import Scorer
from agentrl.core.summaries import GroupSummary, summarize
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import Group, GroupRequest, Status
from agentrl.env.agent_spec import AgentSpec
from agentrl.env.isolation.pool import open_sessions
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.codecs import let_see, make_codec
from agentrl.rollout.endpoint.answers import JSON_PARSER
from agentrl.rollout.endpoint.episode import BlackBoxEpisode
from agentrl.rollout.endpoint.server import EndpointServer
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.forks import Forks, Role
from agentrl.rollout.group import Member, Trajectories, make_member, run_group
from agentrl.rollout.group_rewards import GroupRewards
from agentrl.rollout.hints import Hints
from agentrl.rollout.learned import LearnedRewards
from agentrl.rollout.partners import MakeEngine, Partner, Partners
from agentrl.rollout.plan import EndpointConfig
from agentrl.rollout.records import group_records
from agentrl.rollout.teachers import MakeTeacher, Teachers

TICK_S = 0.1
KV_HIGH, KV_LOW = 0.9, 0.75
WAITING_HIGH = 0.25  # of the requests being decoded
BACK_OFF = 0.8
STEP_UP = 0.05


@dataclass(slots=True)
class AdaptiveLimit:
    """Limit of concurrent episodes with additive increase and multiplicative decrease, from the engine's reported load.

    The engine is overloaded if its cache is nearly full, or its queue is long compared with the decoding requests and was so the last
    time: many prompts that come at once are read within a few steps. The limit then falls to a fraction of the live episodes, and does
    not fall again before that many have ended. If the cache has room, no request waits and the limit holds groups back, the limit
    rises: it doubles until the first overload, and then grows in small steps. Otherwise it stays.
    """

    limit: int  # maximum number of concurrent episodes
    floor: int = 1  # lowest value of the limit
    pressed: bool = False  # true after the first overload
    queued: bool = False  # true if the queue was long the last time

    def observe(self, load: EngineLoad, live: int, held: bool) -> None:
        """Take in the engine's load now, the number of live episodes, and whether a group waits to begin."""
        was_queued, self.queued = self.queued, load.waiting > max(1.0, WAITING_HIGH * load.running)
        if load.kv_usage >= KV_HIGH or (self.queued and was_queued):
            self.pressed = True
            if live <= self.limit:
                self.limit = max(self.floor, math.floor(BACK_OFF * min(live, self.limit)))
        elif held and load.kv_usage <= KV_LOW and load.waiting == 0:
            self.limit += max(1, math.ceil(STEP_UP * self.limit)) if self.pressed else self.limit


class Throttle:
    """Lets groups begin: `fixed` episodes at once, or if that is 0 as many as the engine's load allows, from `start` on."""

    def __init__(self, fixed: int, start: int, stats: Callable[[], EngineStats], clock: Callable[[], float] = time.monotonic) -> None:
        self._fixed, self._adaptive, self._stats, self._clock = fixed, AdaptiveLimit(max(1, start)), stats, clock
        self._held: list[tuple[tuple[bool, int, int], int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._live = 0
        self._timer: asyncio.TimerHandle | None = None
        self._looked_s = self._counted_s = 0.0
        self._episode_s = 0.0  # since the last look at the engine, summed over episodes
        self._sums = LoadSums()

    @property
    def limit(self) -> int:
        """Episodes at once now."""
        return self._fixed or self._adaptive.limit

    @property
    def live(self) -> int:
        """Episodes under way."""
        return self._live

    @property
    def sums(self) -> LoadSums:
        """The load so far."""
        return self._sums

    async def enter(self, group_request: GroupRequest) -> None:
        """Wait until the episodes of a group may begin; each must `leave` then.

        All of a group begin together, since they may wait for each other, and a group always begins when nothing else is under way, so
        none waits forever. Groups that measure the model come first, because the learner waits for them, then those admitted first.

        Consumes room for the group. Waits for episodes to end or the limit to rise; unblocked by `leave` and by the tick.
        """
        self._adaptive.floor = max(self._adaptive.floor, group_request.num_episodes)
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        priority = (group_request.eval_sampling is None, group_request.group_id, group_request.attempt)
        heapq.heappush(self._held, (priority, next(self._order), group_request.num_episodes, begun))
        self._begin_next()
        if self._timer is None:
            self._looked_s = self._counted_s = self._clock()
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        try:
            await begun
        except asyncio.CancelledError:
            # Cancelled just after it had begun: nobody else gives this room back.
            if begun.done() and not begun.cancelled():
                self.leave(group_request.num_episodes)
            raise

    def leave(self, episodes: int = 1) -> None:
        """Say that episodes have ended."""
        self._count()
        self._live -= episodes
        self._begin_next()
        if not self._live and not self._held:
            if self._timer is not None:
                self._look()
            self.close()

    def close(self) -> None:
        """Stop looking at the engine; safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin_next(self) -> None:
        while self._held:
            *_, episodes, begun = self._held[0]
            if not begun.done() and self._live and self._live + episodes > self.limit:
                return
            heapq.heappop(self._held)
            if not begun.done():  # else it was cancelled
                self._count()
                self._live += episodes
                begun.set_result(None)

    def _tick(self) -> None:
        """Look at the engine, again and again while anything is under way."""
        load = self._look()
        self._adaptive.observe(load, self._live, bool(self._held))
        self._begin_next()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _count(self) -> None:
        """Count the time of the episodes that were under way until now."""
        now_s = self._clock()
        self._episode_s += self._live * (now_s - self._counted_s)
        self._counted_s = now_s

    def _look(self) -> EngineLoad:
        """Sum up the time since the last look, under the load of now."""
        self._count()
        seconds, load = self._counted_s - self._looked_s, self._stats().load
        if seconds > 0.0:
            self._sums = self._sums.plus(load, self._episode_s / seconds, seconds)
        self._looked_s, self._episode_s = self._counted_s, 0.0
        return load


class EpisodeWorker:
    """Runs whole groups beside one engine, which it starts and closes; see `agentrl.core.protocols.RolloutWorker`."""

    def __init__(
        self,
        engine: Engine,
        agent: AgentSpec,
        settings: EpisodePlan,
        fit_parser: Callable[[ChatCodec, EndpointConfig], str] | None = None,  # gives the codec a parser of answers other than JSON
        scorers: Mapping[str, Scorer] | None = None,  # reward models by name, which the caller closes
        partner_engine: MakeEngine | None = None,  # makes the engines of partners that are models
        teacher_model: MakeTeacher | None = None,  # makes the teachers that run here
    ) -> None:
        self._fit_parser = fit_parser
        self._engine, self._agent, self._settings = engine, agent, settings
        self._straggler_policy = settings.straggler_policy  # read once: the estimator may be of a user's file
        self._codec: ChatCodec | None = None
        self._learned = LearnedRewards(settings, scorers, agent.spec) if scorers else None
        self._compared = GroupRewards(settings.group_reward) if settings.group_reward else None
        self._partners = Partners(settings, partner_engine)
        self._teachers = Teachers(settings.teaching, teacher_model) if settings.teaching else None
        self._hints: Hints | None = None
        self._sessions = open_sessions(agent, settings.env)
        self._server = EndpointServer(settings.endpoint)  # starts with the first episode that needs it
        self._live: set[asyncio.Task[Trajectories]] = set()
        self._closed = False
        self._throttle = Throttle(settings.max_concurrent, settings.start_concurrent, engine.stats)

    async def start(self) -> None:
        """Load user code, tokenizer and engine.

        Raises:
            EnvLoadError: If the user's class cannot be loaded in this process.
            ConfigError: If the model has no usable tokenizer.
            EngineError: If the engine does not start.
        """
        # User code first: an error in it shows before the engine has started, which takes longer.
        await self._sessions.start()
        await self._engine.start()
        tokenizer = load_tokenizer(self._settings.model.model, trust_remote_code=self._settings.model.trust_remote_code)
        self._codec = make_codec(tokenizer, self._settings, self._engine.end_token_ids)
        let_see(self._codec, self._settings.model, self._settings.images)
        if self._fit_parser is not None:
            await asyncio.to_thread(self._fit_parser, self._codec, self._settings.endpoint)
        if self._learned is not None:
            await self._learned.start()
        if self._teachers is not None:
            await self._teachers.start()
        if file := self._settings.hint_template:
            self._hints = Hints(file, apply_chat_template=self._settings.data.apply_chat_template)
        collect_rarely()

    async def run_group(self, group_request: GroupRequest) -> tuple[GroupSummary, Group]:
        """Run every episode of a group; failures of user code and of single requests become statuses, not exceptions.

        Raises:
            EngineDeadError: If the engine failed for good; nothing of the group counts.
        """
        await self._throttle.enter(group_request)
        start = time.perf_counter()
        logs: dict[int, Mapping[str, Any]] = {}
        group = await self._play(group_request, logs)
        engine = self._engine
        statuses = [trajectory.status for trajectory in (*group.trajectories, *group.greedy)]
        if Status.ENGINE_ERROR in statuses and (fault := engine.stats().fault):
            raise EngineDeadError(fault)
        limits = EngineLimits.of(engine) if group_request.record else None
        records = group_records(group_request, group, limits)
        requests = tuple(logs[index] for index in sorted(logs))
        return summarize(group, seconds=time.perf_counter() - start, records=records, requests=requests), group

    async def load_weights(self, update: WeightUpdate) -> int:
        """As `Engine.load_weights`; episodes go on and wait inside the engine."""
        return await self._engine.load_weights(update)

    async def sleep(self, level: int) -> None:
        """As `SleepingEngine.sleep`; episodes go on and wait inside the engine."""
        await self._sleeper().sleep(level)

    async def wake(self, *parts: Memory) -> None:
        """As `SleepingEngine.wake`."""
        await self._sleeper().wake(*parts)

    def _sleeper(self) -> SleepingEngine:
        if not isinstance(self._engine, SleepingEngine):
            problem = f"{type(self._engine).__name__} cannot give its GPU memory to a learner"
            raise EngineError(f"--colocate: {problem}; add --sleep-level 0, with which both stay in memory")
        return self._engine

    async def stats(self) -> EngineStats:
        """As `Engine.stats`."""
        own = "" if self._codec is None or self._codec.tool_parser == JSON_PARSER else self._codec.tool_parser
        return replace(self._engine.stats(), sums=self._throttle.sums, tool_parser=own, rss_mib=resident_mib())

    async def close(self) -> None:
        """Cancel episodes, close environments and the engine; safe to call twice."""
        self._closed = True
        self._throttle.close()
        # Episodes end first, since they use all that is closed below.
        live = list(self._live)
        for member in live:
            member.cancel()
        if live:
            await asyncio.wait(live)
        await self._server.close()
        await self._partners.close()
        if self._teachers is not None:
            await self._teachers.close()
        await self._sessions.close()
        await self._engine.close()

    async def _play(self, group_request: GroupRequest, logs: dict[int, Mapping[str, Any]]) -> Group:
        """The members side by side; each makes room for others when it ends, and leaves its log of requests, if it has one, in `logs`."""
        left, forks = group_request.num_episodes, Forks(self._settings.forks, group_request)

        async def play(index: int) -> Trajectories:
            nonlocal left
            try:
                member = self._episode(group_request, index, partners, forks.role(index))
                played = await member.run()
                if isinstance(member, BlackBoxEpisode) and member.requests is not None:
                    logs[index] = member.requests
                if self._learned is not None and self._codec is not None:
                    played = await self._learned.judge(group_request, played, self._codec)
                if group_request.eval_sampling is None and index < group_request.n_samples_per_prompt:
                    played = await self._taught(group_request, played)
                return played
            finally:
                left -= 1
                self._throttle.leave()

        try:
            straggler_policy = None if group_request.eval_sampling else self._straggler_policy  # a measurement waits for everything
            async with self._partners.of_group(group_request, self._running_codec()) as partners:
                group = await run_group(group_request, play, self._live, straggler_policy)
        finally:
            forks.close()
            self._throttle.leave(left)  # those that were cancelled before they began
        if self._compared is None or group_request.eval_sampling:
            return group
        return await self._compared.judge(group, self._running_codec())

    async def _taught(self, group_request: GroupRequest, played: Trajectories) -> Trajectories:
        """Return what is to be trained with what a teacher says of it, or reads in place of its prompt."""
        codec = self._running_codec()
        if self._teachers is not None:
            return await self._teachers.judge(group_request, played, len(codec.tokenizer))
        return played if self._hints is None else self._hints.add(group_request.task, played, codec, self._engine.max_model_len)

    def _running_codec(self) -> ChatCodec:
        if self._codec is None or self._closed:
            raise EngineError("this rollout worker is not running: it was not started, or it was closed")
        return self._codec

    def _episode(self, group_request: GroupRequest, index: int, partners: Mapping[str, Partner], role: Role | None) -> Member:
        return make_member(
            group_request,
            index,
            agent=self._agent,
            open_session=self._sessions.session,
            engine=self._engine,
            codec=self._running_codec(),
            settings=self._settings,
            server=self._server,
            partners=partners,
            role=role,
        )
