"""The examination of a run: every hypothesis is tested on the records, the root causes first; advice for a run without a fault."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from agentrl.algo.estimators import estimator_facts
from agentrl.algo.flat import equal_rewards
from agentrl.algo.plan import AlgoConfig
from agentrl.algo.statistics import SAME
from agentrl.doctor import answers, policy, rewards, tasks
from agentrl.doctor.evidence import Evidence
from agentrl.doctor.policy import ends
from agentrl.doctor.verdicts import CAUSES, Advice, Examination, Untested, Verdict

FLAT = 0.5
"""Share of flat groups in the last third of a run from which other groups are worth playing."""


def _compares_totals(algo: AlgoConfig) -> bool:
    """Return True if groups of equal rewards are flat for the estimator, whatever was earned where."""
    return not algo.teacher and estimator_facts(algo.advantage_estimator).is_flat is equal_rewards


def flat_groups(evidence: Evidence) -> Advice | None:
    """Most groups at the end are flat and are trained on all the same."""
    config, groups = evidence.config, evidence.scored
    if config is None or config.flow.flat_groups != "train" or config.flow.group_filter or not _compares_totals(config.algo):
        return None
    if ends(groups) is None:
        return None
    late = groups[-(len(groups) // 3) :]
    flat = [group for group in late if group.flat]
    if len(flat) < FLAT * len(late):
        return None
    solved = sum(group.mean > evidence.highest - SAME for group in flat)
    seen = f"{len(flat)} of the last {len(late)} groups ({len(flat) / len(late):.0%}) are flat: all members earned the same, and nothing"
    seen += " is learned of them"
    remedy = "--flat-groups resample plays other tasks in the place of such groups."
    if solved > len(flat) // 2:
        remedy += f" In {solved} of them every member earned the most: harder tasks teach more."
    return Advice("flat-groups", seen, remedy)


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
