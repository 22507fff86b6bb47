"""Replays with the change that a verdict proposes: what the recorded answers would have been paid."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

from agentrl.check.policies import FORMS, PLAIN, label_text, written
from agentrl.check.results import spread
from agentrl.core.errors import AgentRLError
from agentrl.doctor.answers import MIN_RIGHT, asked_forms, holds_label, quoted
from agentrl.doctor.evidence import Evidence, PlayedEpisode
from agentrl.doctor.verdicts import Examination, Verdict
from agentrl.inspect.replay import Replayer, open_replayer
from agentrl.track.text import counted

MAX_REPLAYS = 64
"""Episodes that are replayed with a change, from all over those of which something is claimed."""
GAIN = 1e-6
GARBAGE = "q"


async def with_replays(examination: Examination, evidence: Evidence, agent: str = "") -> Examination:
    """Return the report with what each change would have paid; a verdict whose change pays nothing is withdrawn.

    Args:
        examination: The report so far.
        evidence: The records.
        agent: The environment to replay in; the run's own if empty.
    """
    tried = {"label-type": _text_labels, "format-never-met": _forms}
    proven, untested = list(examination.proven), dict(examination.untested)
    for verdict in examination.proven:
        if verdict.id not in tried:
            continue
        try:
            paid = await _replayed(verdict, evidence, agent, tried[verdict.id])
        except AgentRLError as error:
            proven[proven.index(verdict)] = replace(verdict, paid=f"no replay: {error}")
            continue
        if paid is None:
            proven.remove(verdict)
            untested[verdict.id] = "refuted: a replay with the change paid no more, or no more than meaningless text"
        else:
            proven[proven.index(verdict)] = replace(verdict, paid=paid)
    return examination.concluded(proven, untested)


Trial: TypeAlias = Callable[[Replayer, Evidence, Sequence[PlayedEpisode]], Awaitable[str | None]]
"""Replays episodes with a change: the gain in words, "" if too few can be replayed, `None` if it is none."""


async def _replayed(verdict: Verdict, evidence: Evidence, agent: str, trial: Trial) -> str | None:
    """Replay the episodes of a verdict with its change, and return the result of the trial."""
    replayer = open_replayer(evidence.run.directory, agent)
    proving = set(verdict.episodes)
    episodes = spread([episode for episode in evidence.episodes if episode.name in proving], MAX_REPLAYS)
    try:
        await replayer.start()
        return await trial(replayer, evidence, episodes)
    finally:
        await replayer.close()


async def _text_labels(replayer: Replayer, evidence: Evidence, episodes: Sequence[PlayedEpisode]) -> str | None:
    changes = [{"label": label_text(episode.task.label)} for episode in episodes]
    return await _gained(replayer, episodes, changes, [episode.answer for episode in episodes], "with the labels as text")


async def _forms(replayer: Replayer, evidence: Evidence, episodes: Sequence[PlayedEpisode]) -> str | None:
    """Write the answers that hold their label in the form that is looked for, and without one alone and in each of the known forms."""
    holding = [each for each in episodes if each.task.label is not None and holds_label(each.answer, each.task.label)]
    wanted = list(dict.fromkeys(line.text for line in asked_forms(evidence))) or [PLAIN, *FORMS]
    refuted = bool(wanted) and PLAIN not in wanted and len(holding) >= MIN_RIGHT
    for form in wanted if len(holding) >= MIN_RIGHT else ():
        answers = [written(form, label_text(one.task.label)) for one in holding]
        changes: list[dict[str, Any]] = [{"texts": _always(answer)} for answer in answers]
        said = await _gained(replayer, holding, changes, answers, f"written as {quoted(answers[0])} and so on")
        if said:
            return said
        refuted &= said is None
    # Where no form is known, the right one may not be among those tried, which refutes nothing; nor does what cannot be replayed.
    return None if refuted else ""


def _always(answer: str) -> Callable[[str], str]:
    return lambda text: answer


async def _paid(replayer: Replayer, episode: PlayedEpisode, **change: Any) -> float | None:
    """Reward of an episode with a change; `None` if it cannot be replayed, or fails then."""
    with suppress(ValueError, KeyError, TypeError, SyntaxError):
        for trajectory in await replayer.changed([episode.record], **change):
            if trajectory.status.trainable and trajectory.reward is not None:
                return float(trajectory.reward)
    return None


async def _gained(
    replayer: Replayer, episodes: Sequence[PlayedEpisode], changes: Sequence[Mapping[str, Any]], answers: Sequence[str], words: str
) -> str | None:
    """Return the gain over all episodes in words; "" if too few could be replayed, `None` if most of them do not earn more.

    Each is also played with meaningless text of the same length in place of its answer, which must earn less.
    """
    known: list[tuple[float, float, float]] = []
    for episode, change, answer in zip(episodes, changes, answers, strict=True):
        after = await _paid(replayer, episode, **change)
        control = await _paid(replayer, episode, **{**change, "texts": _always(re.sub(r"\S", GARBAGE, answer))})
        known += [] if after is None else [(episode.reward, after, -math.inf if control is None else control)]
    if len(known) < MIN_RIGHT:
        return ""
    better = sum(after > max(before, control) + GAIN for before, after, control in known)
    if 2 * better < len(known):
        return None
    before, after = statistics.fmean(pair[0] for pair in known), statistics.fmean(pair[1] for pair in known)
    text = f"{words}, {better} of {counted(len(known), 'replayed episode')} earn more: {before:.3g} becomes {after:.3g} on average"
    garbage = [control for *_, control in known if control > -math.inf]
    return text + (f", and {statistics.fmean(garbage):.3g} with other text of that length" if garbage else "")
