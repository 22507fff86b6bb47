"""The examination of a run: every hypothesis is tested on the records, the root causes first."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from agentrl.doctor import answers, policy, rewards, tasks
from agentrl.doctor.advice import flat_groups
from agentrl.doctor.evidence import Evidence
from agentrl.doctor.verdicts import CAUSES, Examination, Untested, Verdict

Hypothesis: TypeAlias = Callable[[Evidence], Verdict | Untested | None]

HYPOTHESES: Mapping[str, Hypothesis] = {
    "mismatch": policy.mismatch,
    "failed-episodes": tasks.failed_episodes,
    "labels-missing": answers.labels_missing,
    "answers-empty": answers.answers_empty,
    "policy-broke": policy.policy_broke,
    "label-type": answers.label_type,
    "observations-do-not-fit": answers.observations_do_not_fit,
    "answers-cut": answers.answers_cut,
    "turns-cut": answers.turns_cut,
    "format-never-met": answers.format_never_met,
    "all-masked": policy.all_masked,
    "right-earns-less": rewards.right_earns_less,
    "rewards-clipped": policy.rewards_clipped,
    "length-only": rewards.length_only,
    "one-answer-wins": rewards.one_answer_wins,
    "copying-wins": rewards.copying_wins,
    "repetition-wins": rewards.repetition_wins,
    "evaluation-on-training-tasks": tasks.evaluation_on_training_tasks,
    "too-hard": rewards.too_hard,
    "too-easy": rewards.too_easy,
    "no-effect": policy.no_effect,
}
"""Test of each cause; the order is that of `CAUSES`."""
NOT_WHILE_RISING = ("policy-broke", "answers-cut", "turns-cut", "too-hard", "too-easy", "no-effect")
"""Causes that a rising reward refutes."""


def examine(evidence: Evidence, name: str) -> Examination:
    """Test every hypothesis; `name` is the run's directory as the user named it."""
    thirds = policy.ends(evidence.scored)
    first, last = map(statistics.fmean, thirds) if thirds else (0.0, 0.0)
    examination = Examination(
        run=name,
        steps=len(evidence.steps),
        groups=len(evidence.scored),
        episodes=len(evidence.episodes),
        trend=policy.trend(evidence.scored),
        first=first,
        last=last,
    )
    proven: list[Verdict] = []
    untested: dict[str, str] = {}
    for cause in CAUSES:
        if examination.rising and cause in NOT_WHILE_RISING:
            continue
        found = HYPOTHESES[cause](evidence)
        if isinstance(found, Untested):
            untested[cause] = found.reason
        elif found is not None:
            proven.append(found)
    concluded = examination.concluded(proven, untested)
    advice = None if concluded.verdicts else flat_groups(evidence)
    return concluded if advice is None else replace(concluded, advice=(advice,))
