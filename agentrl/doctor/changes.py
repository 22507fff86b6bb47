"""Replays with the change that a verdict proposes: what the recorded answers would have been paid."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

from agentrl.check.policies import FORMS, PLAIN, label_text, written
from agentrl.check.results import spread
from agentrl.core.errors import AgentRLError
from agentrl.doctor.answers import MIN_RIGHT, holds_label, quoted
from agentrl.doctor.evidence import Evidence, PlayedEpisode
from agentrl.doctor.source import sources, wanted_forms
from agentrl.doctor.verdicts import Examination, Verdict
from agentrl.inspect.replay import Replayer, open_replayer
from agentrl.track.text import counted

MAX_REPLAYS = 64
"""Episodes that are replayed with a change, from all over those of which something is claimed."""
GAIN = 1e-6


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
            untested[verdict.id] = "refuted: a replay with the change paid no more"
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
    pairs = [await _paid(replayer, episode, label=label_text(episode.task.label)) for episode in episodes]
    return _gained(pairs, "with the labels as text")


async def _forms(replayer: Replayer, evidence: Evidence, episodes: Sequence[PlayedEpisode]) -> str | None:
    """Write the answers that hold their label in the form that is looked for, and without one alone and in each of the known forms."""
    holding = [each for each in episodes if each.task.label is not None and holds_label(each.answer, each.task.label)]
    wanted = list(dict.fromkeys(line.text for line in wanted_forms(sources(evidence.run)))) or [PLAIN, *FORMS]
    for form in wanted if len(holding) >= MIN_RIGHT else ():
        pairs = [await _paid(replayer, one, texts=_in_form(form, label_text(one.task.label))) for one in holding]
        if said := _gained(pairs, f"written as {quoted(written(form, label_text(holding[0].task.label)))} and so on"):
            return said
    # Where no form is known, the right one may not be among those tried, which refutes nothing.
    return "" if len(holding) < MIN_RIGHT or PLAIN in wanted else None


def _in_form(form: str, label: str) -> Callable[[str], str]:
    return lambda text: written(form, label)


async def _paid(replayer: Replayer, episode: PlayedEpisode, **change: Any) -> tuple[float, float] | None:
    """Rewards of an episode as it was and with a change; `None` if it cannot be replayed, or fails then."""
    with suppress(ValueError, KeyError, TypeError, SyntaxError):
        for trajectory in await replayer.changed([episode.record], **change):
            if trajectory.status.trainable and trajectory.reward is not None:
                return episode.reward, float(trajectory.reward)
    return None


def _gained(pairs: Sequence[tuple[float, float] | None], change: str) -> str | None:
    """The gain over all episodes in words; "" if too few could be replayed, `None` if none of them earns more."""
    known = [pair for pair in pairs if pair is not None]
    if len(known) < MIN_RIGHT:
        return ""
    better = [pair for pair in known if pair[1] > pair[0] + GAIN]
    before, after = (statistics.fmean(values) for values in zip(*known, strict=True))
    text = f"{change}, {len(better)} of {counted(len(known), 'replayed episode')} earn more: {before:.3g} becomes {after:.3g} on average"
    return text if better else None
