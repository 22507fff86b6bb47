"""Advice for a run that has no fault: settings with which it would learn more of what it plays."""

from __future__ import annotations

from agentrl.algo.estimators import estimator_facts
from agentrl.algo.flat import equal_rewards
from agentrl.algo.plan import AlgoConfig
from agentrl.algo.statistics import SAME
from agentrl.doctor.evidence import Evidence
from agentrl.doctor.policy import ends
from agentrl.doctor.verdicts import Advice

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
