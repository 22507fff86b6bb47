"""The episodes of one task, side by side."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from statistics import median
from types import MappingProxyType
from typing import Any, TypeAlias

from agentrl.core.protocols import Engine
from agentrl.core.types import Group, GroupRequest, Status, Trajectory
from agentrl.env.agent_spec import AgentKind, AgentSpec
from agentrl.env.black_box import BlackBoxSession
from agentrl.env.executor import ExecutorSession
from agentrl.env.multi_agent import multi_agent_spec
from agentrl.env.session import Session
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.endpoint.episode import BlackBoxEpisode
from agentrl.rollout.endpoint.server import EndpointServer
from agentrl.rollout.episode import Episode, episode_id
from agentrl.rollout.episode_plan import EpisodePlan, StragglerPolicy
from agentrl.rollout.executor_episode import ExecutorEpisode
from agentrl.rollout.forks import Role
from agentrl.rollout.partners import Partner

Trajectories: TypeAlias = tuple[Trajectory, ...]
"""The outcome of one episode: a trajectory for each of its agents."""

RunMember: TypeAlias = Callable[[int], Coroutine[Any, Any, Trajectories]]


async def run_group(
    group_request: GroupRequest,
    run_member: RunMember,
    live: set[asyncio.Task[Trajectories]],
    straggler_policy: StragglerPolicy | None = None,
) -> Group:
    """Run every member of a group, and the greedy episode beside them if the group request asks for one.

    Consumes the request, produces the group, waits for its members, each of which has a deadline of its own. A member that fails is an
    episode with a status and disturbs no other; an error that is no failure of user code or engine is a bug, cancels the others and is
    raised. `live` holds the members' tasks while they run; one that is cancelled becomes a cancelled trajectory. `straggler_policy` decides
    when members that are much later than the rest are cancelled as stragglers, which is their status in the group.
    """
    members = [
        asyncio.create_task(run_member(index), name=f"episode {episode_id(group_request, index)}")
        for index in range(group_request.num_episodes)
    ]
    live.update(members)
    late = ""
    try:
        if straggler_policy is None:
            await asyncio.wait(members, return_when=asyncio.FIRST_EXCEPTION)
        else:
            late = await _wait_for_most(members, straggler_policy)
    finally:
        # Also if this is cancelled: no member goes on without its group.
        await _end(members)
        live.difference_update(members)
    for member in members:
        if not member.cancelled() and (error := member.exception()) is not None:
            raise error
    outcomes = [_cancelled(group_request, index, late) if member.cancelled() else member.result() for index, member in enumerate(members)]
    played, greedy = outcomes[: group_request.n_samples_per_prompt], outcomes[group_request.n_samples_per_prompt :]
    return Group(
        group_id=group_request.group_id,
        task=group_request.task,
        trajectories=tuple(itertools.chain(*played)),
        greedy=tuple(itertools.chain(*greedy)),
        record=group_request.record,
    )


async def _wait_for_most(members: list[asyncio.Task[Trajectories]], straggler_policy: StragglerPolicy) -> str:
    """Wait until all have ended, one has raised, or the rest is too late; returns why the rest is to be cancelled, empty if nothing is.

    Consumes nothing. Waits for members, and from the quorum on for the deadline that follows from them; unblocked by either.
    """
    clock = asyncio.get_running_loop().time
    begin_s, ended_s, pending = clock(), list[float](), set(members)
    while pending:
        deadline_s = straggler_policy.deadline_s(ended_s, len(members))
        left_s = None if deadline_s is None else max(0.0, begin_s + deadline_s - clock())
        done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            took = f"the median of the {len(ended_s)} that ended is {median(ended_s):.3g} s"
            return f"cancelled as a straggler after {clock() - begin_s:.3g} s: {took} (--group-quorum)"
        ended = [member for member in done if not member.cancelled()]
        if any(member.exception() is not None for member in ended):
            break
        ended_s += [clock() - begin_s] * sum(any(part.trainable for part in member.result()) for member in ended)
    return ""


async def _end(members: list[asyncio.Task[Trajectories]]) -> None:
    left = [member for member in members if not member.done()]
    for member in left:
        member.cancel()
    if left:
        await asyncio.wait(left)


def _cancelled(group_request: GroupRequest, index: int, late: str) -> Trajectories:
    name = episode_id(group_request, index)
    cancelled = Trajectory(
        trajectory_id=name,
        episode_id=name,
        group_id=group_request.group_id,
        turns=(),
        status=Status.CANCELLED_STRAGGLER if late else Status.CANCELLED,
        error=late or "cancelled: the worker was closed",
    )
    return (cancelled,)


Member: TypeAlias = Episode | ExecutorEpisode | BlackBoxEpisode


def make_member(
    group_request: GroupRequest,
    index: int,
    *,
    agent: AgentSpec,
    open_session: Callable[[], Session],
    engine: Engine,
    codec: ChatCodec,
    settings: EpisodePlan,
    server: EndpointServer | None = None,
    partners: Mapping[str, Partner] = MappingProxyType({}),
    role: Role | None = None,
) -> Member:
    """Return the episode of member number `index` of a requested group, to be run once; what the group request changes for it is applied.

    `open_session` makes the environment, unless the class is an `Executor` or a `BlackBoxAgent`, which run in this process. A black-box
    agent reaches the model through `server`, which its caller closes, or through one of its own. `partners` play agents by name;
    `role` is the member's part in a fork, if the group has forks.
    """
    settings = settings.for_member(group_request, index)
    cls, source = agent.load(), agent.source
    if agent.kind is AgentKind.EXECUTOR:
        executor = ExecutorSession(cls, source, settings.env)
        return ExecutorEpisode(group_request, index, engine=engine, codec=codec, env=executor, settings=settings)
    if agent.kind is AgentKind.BLACK_BOX:
        black_box = BlackBoxSession(cls, source, settings.env, settings.program_limits)
        return BlackBoxEpisode(group_request, index, engine=engine, codec=codec, env=black_box, settings=settings, server=server)
    agents_spec = multi_agent_spec(cls, source)
    if partners:
        agents_spec = replace(agents_spec, trained=agents_spec.trained - partners.keys())
    more: dict[str, Any] = {"agents_spec": agents_spec, "partners": partners, "role": role}
    return Episode(group_request, index, engine=engine, codec=codec, env=open_session(), settings=settings, **more)
