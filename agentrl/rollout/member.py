"""One episode of whatever kind of environment the user wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from agentrl.core.protocols import Engine
from agentrl.core.types import Ticket
from agentrl.env.boundary import Session
from agentrl.env.executor import Executor, ExecutorSession
from agentrl.env.load import AgentSpec
from agentrl.env.multi_agent import multi_agent_spec
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.episode import Episode
from agentrl.rollout.executor_episode import ExecutorEpisode
from agentrl.rollout.settings import EpisodeSettings

Member: TypeAlias = Episode | ExecutorEpisode


def make_member(
    ticket: Ticket,
    index: int,
    *,
    agent: AgentSpec,
    open_session: Callable[[], Session],
    engine: Engine,
    codec: ChatCodec,
    settings: EpisodeSettings,
) -> Member:
    """The episode of member number `index` of a ticket's group, to be run once.

    Args:
        ticket: The group; what its eval_sampling changes is applied.
        index: Number of the member, from 0.
        agent: The user's class.
        open_session: Makes the environment, unless the class is an `Executor`, which runs in this process.
        engine: Samples.
        codec: Of the model's tokenizer.
        settings: How episodes are run.
    """
    settings = settings.for_eval_sampling(ticket.eval_sampling)
    cls, source = agent.load(), agent.source
    if issubclass(cls, Executor):
        executor = ExecutorSession(cls, source, settings.env)
        return ExecutorEpisode(ticket, index, engine=engine, codec=codec, env=executor, settings=settings)
    agents_spec = multi_agent_spec(cls, source)
    return Episode(ticket, index, engine=engine, codec=codec, env=open_session(), settings=settings, agents_spec=agents_spec)
