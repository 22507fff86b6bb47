"""Checks that pictures matter: with shuffled pictures, right answers must score less."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

from agentrl.check.context import Context, stable
from agentrl.check.findings import NO_TIME
from agentrl.check.learning import SAME, in_the_way
from agentrl.check.play import SOLVER, CheckedEpisode, TextPolicy, repeating
from agentrl.check.policies import label_policy
from agentrl.check.results import spread
from agentrl.core.model_shape import reads_images
from agentrl.core.types import Task

PLAYED, MIN_TASKS = 32, 8
"""Tasks that are played with right answers, and how many must agree before pictures are called idle."""
PICTURES_S = 10.0


async def check_pictures(context: Context) -> None:
    """Play right answers to one picture against another one that comes with the same text.

    A player who sees one picture in the place of another gives the answer to that picture. If such answers score as much as the right
    ones wherever the text is the same, nothing depends on the pictures.
    """
    seen = [played for played in context.good() if played.pictures]
    if not seen or not reads_images(context.settings.model.model) or in_the_way(context):
        return
    if context.report.has("nondeterministic", "group-differs"):
        return
    where = (seen[0].images or ("reset", 0))[0]
    policy = _right_answers(context)
    if policy is None:  # wrong answers alone may end every episode of a game at its first picture
        context.report.skipped.append("whether pictures matter: no right answer is known, by a label or solve")
        return
    if len({played.task.id for played in seen}) >= MIN_TASKS // 2 and _all_alike(seen):
        context.found("images-idle", where, f"the same pictures in each of {len(seen)} episodes")
        return
    pairs = await _exchanged(context, policy)
    if any(other.reward < own.reward - SAME or other.score < own.score - SAME for own, other in pairs):
        return
    if len(pairs) >= MIN_TASKS:
        context.found("images-idle", where, f"the right answer to another picture earned as much in each of {len(pairs)} tasks")
    else:
        reason = NO_TIME if context.left(0.9) <= 0 else f"{len(pairs)} tasks have the text of another one and other pictures"
        context.report.skipped.append(f"whether pictures matter: {reason}")


def _all_alike(episodes: Sequence[CheckedEpisode]) -> bool:
    """Return True if every episode shows what the longest one shows."""
    longest = max((played.pictures for played in episodes), key=len)
    return all(played.pictures == longest[: len(played.pictures)] for played in episodes)


def _right_answers(context: Context) -> TextPolicy | None:
    if callable(getattr(context.cls, "solve", None)):
        return SOLVER
    return label_policy(context.form) if any(task.label is not None for task in context.tasks) else None


async def _exchanged(context: Context, policy: TextPolicy) -> list[tuple[CheckedEpisode, CheckedEpisode]]:
    """Return episodes with right answers, each beside one of the same task with the answers to another picture behind the same text."""
    stop = time.monotonic() + min(context.left(0.9), PICTURES_S)
    groups: dict[str, list[CheckedEpisode]] = defaultdict(list)
    for task in _alike(context.tasks):
        if time.monotonic() > stop:
            break
        played = await context.player.play(task, policy)
        if played.good and played.pictures and played.score > SAME:
            groups[played.first].append(played)
    pairs: list[tuple[CheckedEpisode, CheckedEpisode]] = []
    for group in groups.values():
        for own in group:
            if time.monotonic() > stop:
                return pairs
            others = [other for other in group if other.pictures != own.pictures]
            told = next((other for other in others if other.actions != own.actions), others[0] if others else None)
            if told is not None:
                played = await context.player.play(own.task, repeating(told.actions))
                pairs += [(own, played)] if played.good else []
    return pairs


def _alike(tasks: Sequence[Task]) -> list[Task]:
    """Return some tasks, of those whose prompts are the same as far as there are any."""
    groups: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        groups[stable(task.prompt)].append(task)
    several = sorted((group for group in groups.values() if len(group) > 1), key=len, reverse=True)[: PLAYED // 4]
    if not several:
        return spread(tasks, PLAYED)
    return [task for group in several for task in spread(group, PLAYED // len(several))]
