"""Rules of the flow of groups: overlap, filtering, forks."""

from __future__ import annotations

from agentrl.core.errors import ConfigError
from agentrl.core.settings import refuse_set
from agentrl.flow.plan import FlowConfig, branch_entropy


def _async_and_staleness_agree(flow: FlowConfig) -> None:
    if flow.asynchronous and flow.max_staleness == 0:
        remedy = "Leave out --async for synchronous training, or allow a staleness of 1."
        raise ConfigError("--max-staleness", 0, "contradicts --async", remedy)


def _ranges_are_ordered(flow: FlowConfig) -> None:
    if flow.score_range is None:
        return
    if not flow.score_range[0] < flow.score_range[1]:
        problem = "the first number must be smaller than the second"
        raise ConfigError("--score-range", flow.score_range, problem, "Swap them.")


def _forks_fit_the_group(flow: FlowConfig, samples: int, turns: int, *, has_partners: bool) -> None:
    if flow.branch_at == "never":
        refuse_set(flow, ("branches",), "has no effect without --branch-at", "Add it, or leave this out.")
        return
    if isinstance(flow.branch_at, str):
        branch_entropy(flow.branch_at)
    elif flow.branch_at >= turns:
        problem = f"is no turn of an episode of --max-turns {turns}, whose turns are 0 to {turns - 1}"
        raise ConfigError("--branch-at", flow.branch_at, problem, "Name an earlier turn, or raise --max-turns.")
    if samples % flow.branches:
        problem = f"does not divide the group of --n-samples-per-prompt {samples} into forks of equal size"
        raise ConfigError("--branches", flow.branches, problem, "Give a divisor of it.")
    if has_partners:
        problem = "does not go with --partner, whose side of an episode cannot be copied"
        raise ConfigError("--branch-at", flow.branch_at, problem, "Leave out one of the two.")


def check_flow(flow: FlowConfig, *, samples: int, turns: int, has_partners: bool) -> None:
    """Apply the rules of the flow.

    Args:
        flow: The settings.
        samples: Episodes of a group.
        turns: Turns of an episode at most.
        has_partners: True if an agent of the episodes is played by another model.

    Raises:
        ConfigError: For the first rule that does not hold.
    """
    _async_and_staleness_agree(flow)
    _ranges_are_ordered(flow)
    _forks_fit_the_group(flow, samples, turns, has_partners=has_partners)
