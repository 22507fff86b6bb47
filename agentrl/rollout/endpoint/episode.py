"""The episode of a black-box agent: a program that talks to the endpoint, and a recorder behind it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentrl.core.errors import EnvError, EnvResultError
from agentrl.core.protocols import Engine, EngineLimits
from agentrl.core.types import GroupRequest, Status, Trajectory
from agentrl.env.black_box import BlackBoxSession
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.endpoint.graph import CONSTRAINED
from agentrl.rollout.endpoint.helpers import helpers
from agentrl.rollout.endpoint.request_log import RequestLog
from agentrl.rollout.endpoint.server import EndpointServer
from agentrl.rollout.endpoint.session import NOT_SELECTED, EndpointSession, rewards_by_answer
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.program_episode import ProgramEpisode
from agentrl.rollout.recorder import Context


class BlackBoxEpisode(ProgramEpisode):
    """The episode of a `BlackBoxAgent`, which it closes at the end.

    Every context of the recorder is a branch of the episode. All are one trajectory, so that the episode weighs once in its group; only
    branches with a reward of their own are trajectories of their own, as the agents of a multi-agent episode are. Without a `server` the
    episode has one of its own.
    """

    def __init__(
        self,
        group_request: GroupRequest,
        index: int,
        *,
        engine: Engine,
        codec: ChatCodec,
        env: BlackBoxSession,
        settings: EpisodePlan,
        server: EndpointServer | None = None,
    ) -> None:
        super().__init__(group_request, index, engine=engine, codec=codec, settings=settings, tools=env.take_spans)
        self._env = env
        self._server, self._own_server = server or EndpointServer(settings.endpoint), server is None
        self._log = RequestLog() if settings.endpoint.record_requests and index < group_request.record else None
        self._helpers: Mapping[Context, str] = {}  # contexts of helpers, known at the end
        self.requests: Mapping[str, Any] | None = None  # log of the requests once the episode is over, if it is to be recorded
        limit = settings.endpoint.max_requests
        self.session = EndpointSession(self._recorder, parser=codec.parser, max_requests=limit, log=self._log, turns=self._server.turns)

    async def _play(self) -> Status:
        llm = await self._server.open(self.session)
        self._called_s = time.perf_counter()
        try:
            self._result = await self._env.run(self._group_request.task, llm, self._settings.rollout.episode_timeout_s)
        except EnvError as error:
            # The failure of the engine is named, as the agent's error may be a consequence of it.
            if self.session.failure is not None:
                raise self.session.failure from error
            if self.session.limit_reached:
                limit = self._settings.endpoint.max_requests
                raise EnvError(f"the agent sent more than {limit} requests (--max-requests): {error}") from error
            raise
        finally:
            await self._server.end(llm)
        if self.session.failure is not None:
            raise self.session.failure
        if all(turn.masked for turn in self._recorder.turns):
            raise EnvError(f"the agent ended without an answer of the model, so there is nothing to train: {self._why_silent()}")
        return Status.TRUNCATED if self._result.truncated or self.session.limit_reached else Status.FINISHED

    def _why_silent(self) -> str:
        counts, refusal = self.session.counts, self.session.last_refusal
        if any(turn.masked == CONSTRAINED for turn in self._recorder.turns):
            return "its requests forced the form of every answer, and such answers are not trained (see docs/black_box.md)"
        if not counts["requests"]:
            return "it sent no request to the address that it was given (llm.base_url, llm.env())"
        last = f", the last with {refusal.status}: {refusal.message}" if refusal else ""
        return f"{counts['refused']} of its {counts['requests']} requests were refused{last}, and it left {counts['abandoned']}"

    async def _close(self) -> None:
        await self._env.close()
        if self._own_server:
            await self._server.close()

    def _trajectories(self, status: Status, error: str | None, timings: Mapping[str, float]) -> tuple[Trajectory, ...]:
        if self._log is not None:
            ends = [exchange.end() for exchange in self.session.exchanges]
            log = self._log.record(ends, self._recorder.contexts, EngineLimits.of(self._recorder.engine))
            self.requests = {"episode_id": self._id, "group_id": self._group_request.group_id, **log}
        self._helpers = helpers(self.session.exchanges)
        for context, why in self._helpers.items():
            context.note(0, helper=why)
        if status.trainable:
            try:
                return self._branches(status, timings)
            except EnvResultError as problem:
                status, error = Status.ENV_ERROR, str(problem)
        return (self._trajectory(status, error, timings, self._recorder.contexts, 0.0),)

    def _branches(self, status: Status, timings: Mapping[str, float]) -> tuple[Trajectory, ...]:
        """The trajectories: one of each branch with a reward of its own, and one of the others; all get what `run` returned for all."""
        self._select()
        by_answer, by_branch = rewards_by_answer(self._result.rewards, self._id)
        names = {exchange.branch for exchange in self.session.exchanges if exchange.place is not None}
        for name in by_branch:
            if name not in names:
                known = ", ".join(sorted(map(repr, names))) or "none"
                raise EnvResultError(f"rewards[{name!r}]: is no id of an answer of this episode and no name of a branch; there is {known}")
        for number in by_answer:
            if number >= len(self.session.exchanges) or self.session.exchanges[number].place is None:
                raise EnvResultError(f"rewards: this episode has no answer number {number}")
        self._pay(by_answer)
        own = {name for name in by_branch if name}
        owners = [(owner if (owner := self._owner(context)) in own else "", context) for context in self._recorder.contexts]
        parts = {name: [context for owner, context in owners if owner == name] for name in sorted({owner for owner, _ in owners})}
        reward = self._result.reward
        return tuple(self._trajectory(status, None, timings, part, reward + by_branch.get(name, 0.0), name) for name, part in parts.items())

    def _pay(self, by_answer: Mapping[int, float]) -> None:
        """Put rewards on the turns of answers."""
        for number, reward in by_answer.items():
            place = self.session.exchanges[number].place
            assert place is not None
            context, index = place
            context.turns[index] = replace(context.turns[index], reward=context.turns[index].reward + reward)

    def _owner(self, context: Context) -> str:
        """Name of the branch whose request opened a context."""
        places = ((exchange.branch, exchange.place) for exchange in self.session.exchanges)
        return next((branch for branch, place in places if place is not None and place[0] is context), "")

    def _select(self) -> None:
        """Mask the branches that are not to be trained."""
        wanted = self._settings.endpoint.train_branches
        if wanted == "all":
            return
        answered = [exchange.place[0] for exchange in self.session.exchanges if exchange.place is not None]
        final = next((context for context in reversed(answered) if not context.masked), None)
        for context in self._recorder.contexts:
            if wanted == "agent":
                chosen = context not in self._helpers
            else:
                chosen = context is final if wanted == "final" else self._owner(context) in wanted.split(",")
            if not chosen and not context.masked:
                context.mask(NOT_SELECTED)

    def _metrics(self) -> Mapping[str, float]:
        return {**self.session.metrics(), "endpoint/helpers": float(len(self._helpers))}
