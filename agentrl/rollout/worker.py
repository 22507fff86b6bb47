"""The plain object behind a rollout worker: one engine, and the episodes that run against it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from agentrl.core.errors import EngineDeadError, EngineError
from agentrl.core.process import collect_rarely
from agentrl.core.protocols import Engine, EngineStats, WeightUpdate
from agentrl.core.summaries import GroupSummary, summarize
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import Group, Status, Ticket
from agentrl.env.isolation.pool import open_sessions
from agentrl.env.load import AgentSpec
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.group import Member, Trajectories, make_member, run_group
from agentrl.rollout.records import EngineLimits, group_records
from agentrl.rollout.settings import EpisodeSettings
from agentrl.rollout.throttle import Throttle


class EpisodeWorker:
    """Runs whole groups beside one engine; see `agentrl.core.protocols.RolloutWorker`.

    Args:
        engine: Owned: started and closed with the worker.
        agent: The user's class.
        settings: Settings of the episodes.
    """

    def __init__(self, engine: Engine, agent: AgentSpec, settings: EpisodeSettings) -> None:
        self._engine, self._agent, self._settings = engine, agent, settings
        self._straggler_policy = settings.straggler_policy  # read once: the estimator may be of a user's file
        self._codec: ChatCodec | None = None
        self._sessions = open_sessions(agent, settings.env)
        self._live: set[asyncio.Task[Trajectories]] = set()
        self._closed = False
        self._throttle = Throttle(settings.rollout.max_concurrent_episodes, settings.start_concurrent, engine.stats)

    async def start(self) -> None:
        """Load user code, tokenizer and engine.

        Raises:
            EnvLoadError: If the user's class cannot be loaded in this process.
            ConfigError: If the model has no usable tokenizer.
            EngineError: If the engine does not start.
        """
        await self._sessions.start()
        await self._engine.start()
        tokenizer = load_tokenizer(self._settings.model.model, trust_remote_code=self._settings.model.trust_remote_code)
        ends = self._engine.end_token_ids
        self._codec = ChatCodec(tokenizer, system_prompt=self._settings.data.system_prompt, end_token_ids=ends)
        collect_rarely()

    async def run_group(self, ticket: Ticket) -> tuple[GroupSummary, Group]:
        """Run every episode of a group; failures of user code and of single requests become statuses, not exceptions.

        Raises:
            EngineDeadError: If the engine failed for good; nothing of the group counts.
        """
        await self._throttle.enter(ticket)
        start = time.perf_counter()
        group = await self._play(ticket)
        engine = self._engine
        if any(trajectory.status is Status.ENGINE_ERROR for trajectory in group.trajectories) and (fault := engine.stats().fault):
            raise EngineDeadError(fault)
        limits = EngineLimits(max_model_len=engine.max_model_len, end_token_ids=engine.end_token_ids) if ticket.record else None
        records = group_records(ticket, group, limits)
        return summarize(group, seconds=time.perf_counter() - start, records=records), group

    async def load_weights(self, update: WeightUpdate) -> int:
        """As `Engine.load_weights`; episodes go on and wait inside the engine."""
        return await self._engine.load_weights(update)

    async def stats(self) -> EngineStats:
        """As `Engine.stats`."""
        return replace(self._engine.stats(), sums=self._throttle.sums)

    async def close(self) -> None:
        """Cancel episodes, close environments and the engine; safe to call twice."""
        self._closed = True
        self._throttle.close()
        live = list(self._live)
        for member in live:
            member.cancel()
        if live:
            await asyncio.wait(live)
        await self._sessions.close()
        await self._engine.close()

    async def _play(self, ticket: Ticket) -> Group:
        """The members side by side; each makes room for others when it ends."""
        left = ticket.n_samples_per_prompt

        async def play(index: int) -> Trajectories:
            nonlocal left
            try:
                return await self._episode(ticket, index).run()
            finally:
                left -= 1
                self._throttle.leave()

        try:
            straggler_policy = None if ticket.eval_sampling else self._straggler_policy  # a measurement waits for everything
            return await run_group(ticket, play, self._live, straggler_policy)
        finally:
            self._throttle.leave(left)  # those that were cancelled before they began

    def _episode(self, ticket: Ticket, index: int) -> Member:
        if self._codec is None or self._closed:
            raise EngineError("this rollout worker is not running: it was not started, or it was closed")
        return make_member(
            ticket,
            index,
            agent=self._agent,
            open_session=self._sessions.session,
            engine=self._engine,
            codec=self._codec,
            settings=self._settings,
        )
