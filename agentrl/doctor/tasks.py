"""Hypotheses about episodes that fail, and about the tasks of the evaluation."""

from __future__ import annotations

from collections import Counter

from agentrl.doctor.answers import MIN_EPISODES, names
from agentrl.doctor.evidence import Evidence, PlayedEpisode
from agentrl.doctor.verdicts import Untested, Verdict
from agentrl.evaluation.statistics import share
from agentrl.track.index import TRAINING
from agentrl.track.text import counted

FAILED = 0.25
"""Lower end of the interval of the share of failed episodes from which they dominate."""
MIN_TASKS, MIN_COMMON, COMMON = 8, 4, 0.1
"""Tasks of evaluations to look at, and those among them that are trained on: their number, and the lower end of their share."""


def failed_episodes(evidence: Evidence) -> Verdict | Untested | None:
    """A large share of the episodes fails, so that the rest is a choice that nobody made."""
    failures, played = sum(group.failures for group in evidence.groups), sum(len(group.rewards) for group in evidence.groups)
    if failures + played < MIN_EPISODES:
        return Untested(f"{counted(failures + played, 'episode')}, at least {MIN_EPISODES} are needed")
    seen = share(failures, failures + played)
    if seen.low < FAILED:
        return None
    failed = [group for group in evidence.groups if group.failures]
    status = Counter(group.status for group in failed).most_common(1)[0][0]
    errors = Counter(error for group in failed for error in group.errors).most_common(1)
    rows = evidence.run.store.query("SELECT DISTINCT episode FROM episodes WHERE source = ? AND status = ? ORDER BY id", (TRAINING, status))
    text = f"{failures} of {failures + played} episodes failed, most with {status}" + (f": {errors[0][0]}" if errors else "")
    remedy = f"Mend the error: `agentrl inspect {evidence.run.path} --status {status}` lists the episodes."
    return Verdict(id="failed-episodes", seen=text, share=seen, episodes=tuple(row[0] for row in rows), remedy=remedy)


def evaluation_on_training_tasks(evidence: Evidence) -> Verdict | Untested | None:
    """Tasks of the evaluation have the prompt and the label of tasks that are trained on."""
    if len(evidence.evaluated) < MIN_TASKS:
        return Untested(f"{counted(len(evidence.evaluated), 'recorded evaluation task')}, at least {MIN_TASKS} are needed")
    trained = {_question(episode): episode for episode in evidence.trained_tasks}
    both = [episode for episode in evidence.evaluated if _question(episode) in trained]
    seen = share(len(both), len(evidence.evaluated))
    if len(both) < MIN_COMMON or seen.low < COMMON:
        return None
    text = f"{len(both)} of {len(evidence.evaluated)} evaluation tasks have the prompt and the label of a training task, such as "
    text += f"{both[0].task.id!r}, in training {trained[_question(both[0])].task.id!r}"
    pairs = [one for episode in both for one in (episode, trained[_question(episode)])]
    return Verdict(id="evaluation-on-training-tasks", seen=text, share=seen, episodes=names(pairs))


def _question(episode: PlayedEpisode) -> tuple[str, str]:
    return episode.prompt, repr(episode.task.label)
