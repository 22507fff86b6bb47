"""Rules of the flow of groups: overlap, filtering, forks."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.core.settings import refuse_set


def _async_and_staleness_agree(config: TrainConfig) -> None:
    if config.flow.asynchronous and config.flow.max_staleness == 0:
        remedy = "Leave out --async for synchronous training, or allow a staleness of 1."
        raise ConfigError("--max-staleness", 0, "contradicts --async", remedy)


def _ranges_are_ordered(config: TrainConfig) -> None:
    low, high = config.flow.dynamic_filtering_range
    if not low < high:
        problem = "the first number must be smaller than the second"
        raise ConfigError("--dynamic-filtering-range", (low, high), problem, "Swap them.")


def _forks_fit_the_group(config: TrainConfig) -> None:
    flow, samples, turns = config.flow, config.sampling.n_samples_per_prompt, config.rollout.max_turns
    if flow.branch_at == "never":
        refuse_set(flow, ("branches", "branch_entropy"), "has no effect without --branch-at", "Add it, or leave this out.")
        return
    if flow.branch_at != "entropy":
        refuse_set(flow, ("branch_entropy",), "has no effect without --branch-at entropy", "Add it, or leave this out.")
        if flow.branch_at >= turns:
            problem = f"is no turn of an episode of --max-turns {turns}, whose turns are 0 to {turns - 1}"
            raise ConfigError("--branch-at", flow.branch_at, problem, "Name an earlier turn, or raise --max-turns.")
    if samples % flow.branches:
        problem = f"does not divide the group of --n-samples-per-prompt {samples} into forks of equal size"
        raise ConfigError("--branches", flow.branches, problem, "Give a divisor of it.")
    if config.partner.partner:
        problem = "does not go with --partner, whose side of an episode cannot be copied"
        raise ConfigError("--branch-at", flow.branch_at, problem, "Leave out one of the two.")


FLOW_RULES: tuple[Callable[[TrainConfig], None], ...] = (_async_and_staleness_agree, _ranges_are_ordered, _forks_fit_the_group)
