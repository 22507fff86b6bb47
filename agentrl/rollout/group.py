"""The episodes of one task, side by side."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from agentrl.core.types import Group, Status, Ticket, Trajectory
from agentrl.rollout.episode import episode_id

Played: TypeAlias = tuple[Trajectory, ...]
"""One episode: a trajectory for each of its agents."""

RunMember: TypeAlias = Callable[[int], Coroutine[Any, Any, Played]]


async def run_group(ticket: Ticket, run_member: RunMember, live: set[asyncio.Task[Played]]) -> Group:
    """Run every member of a group.

    Consumes the ticket, produces the group, waits for its members, each of which has a deadline of its own. A member that
    fails is an episode with a status and disturbs no other; an error that is no failure of user code or engine is a
    bug, cancels the others and is raised.

    Args:
        ticket: What to run.
        run_member: Plays the member with a number.
        live: Holds the members' tasks while they run; whoever cancels one of them makes it a cancelled trajectory.
    """
    members = [asyncio.create_task(run_member(index), name=f"episode {episode_id(ticket, index)}") for index in range(ticket.num_samples)]
    live.update(members)
    try:
        await asyncio.wait(members, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await _end(members)
        live.difference_update(members)
    for member in members:
        if not member.cancelled() and (error := member.exception()) is not None:
            raise error
    played = [_cancelled(ticket, index) if member.cancelled() else member.result() for index, member in enumerate(members)]
    return Group(group_id=ticket.group_id, task=ticket.task, trajectories=tuple(itertools.chain(*played)))


async def _end(members: list[asyncio.Task[Played]]) -> None:
    left = [member for member in members if not member.done()]
    for member in left:
        member.cancel()
    if left:
        await asyncio.wait(left)


def _cancelled(ticket: Ticket, index: int) -> Played:
    name = episode_id(ticket, index)
    cancelled = Trajectory(
        trajectory_id=name,
        episode_id=name,
        group_id=ticket.group_id,
        turns=(),
        status=Status.CANCELLED,
        error="cancelled: the worker was closed",
    )
    return (cancelled,)
