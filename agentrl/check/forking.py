"""An episode that goes on from a snapshot is the one that the snapshot was made of: same actions, same observations and rewards."""

from __future__ import annotations

from agentrl.check.context import Context
from agentrl.check.determinism import compared, scripts_to_repeat
from agentrl.check.findings import NO_TIME
from agentrl.check.play import CheckedEpisode, TextEpisode, repeating
from agentrl.core.types import Task
from agentrl.env.agent import has_snapshots
from agentrl.rollout.episode_plan import ForkSettings
from agentrl.rollout.forks import Fork, Role

COPIES = 2
"""Episodes that go on from the same turn, one after the other, so that one may disturb the next."""
UNRELIABLE = ("nondeterministic", "group-differs", "shared-state", "global-reseed")
"""Findings after which a difference says nothing about snapshots."""


async def check_forks(context: Context) -> None:
    """Have episodes go on from a turn in the middle and from their last, after the original has ended."""
    if not has_snapshots(context.cls):
        return
    if context.report.has(*UNRELIABLE):
        context.report.skipped.append("snapshots: episodes differ without them")
        return
    for task, actions in scripts_to_repeat(context):
        for number in sorted({len(actions) // 2, len(actions) - 1}):
            if context.left(0.6) <= 0:
                context.report.skipped.append(f"some snapshots: {NO_TIME}")
                return
            if not await _check_fork(context, task, actions, number):
                return


async def _check_fork(context: Context, task: Task, actions: list[str], number: int) -> bool:
    """Compare an episode with those that part before its turn `number`; return False if there is nothing more to find."""
    fork = Fork(ForkSettings(at=number, branches=COPIES + 1))
    root = TextEpisode(context.player, task, repeating(actions), role=Role(fork, is_root=True))
    copies = [TextEpisode(context.player, task, repeating(actions), role=Role(fork, is_root=False)) for _ in range(COPIES)]
    try:
        await root.run()
        if root.played.error is not None:
            # An environment whose state cannot be copied says so by an error.
            said = str(root.played.error).partition("\n")[0]
            context.report.skipped.append(f"snapshots: {said}")
            return False
        for copy in copies:
            await copy.run(root)
            if (seen := _difference(root.played, copy.played, number)) is not None:
                # Only where the episode repeats itself without a snapshot is the snapshot to blame.
                again = await context.player.play(task, repeating(actions))
                if compared(root.played.values(), again.values(), "") is None:
                    context.found("snapshot-differs", *seen)
                return False
        return True
    finally:
        fork.close()
        for episode in (root, *copies):
            await episode.close()


def _difference(root: CheckedEpisode, copy: CheckedEpisode, number: int) -> tuple[str, str] | None:
    """Return the method to blame and how a copy differs from its root; `None` if it does not."""
    if copy.error is not None:
        return "restore", f"an episode that goes on before turn {number} fails: {copy.error}"
    difference = compared(root.values(), copy.values(), "{} in the episode itself and {} in its copy")
    return None if difference is None else ("snapshot", f"going on before turn {number}, {difference[1]}")
