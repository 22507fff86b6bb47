"""Rules for a step that is trained in parts: nothing that a part needs may depend on the groups of another."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.config.schema import PER_GROUP_ESTIMATORS, TrainConfig
from agentrl.core.errors import ConfigError

FLAG = "--learner-parts"


def _parts_have_groups(config: TrainConfig) -> None:
    parts, groups, ranks = config.flow.learner_parts, config.rollout.groups_per_step, config.learner.num_learners
    if parts > 1 and groups // parts < ranks:
        problem = f"leaves parts of --groups-per-step {groups} without a group for each of --num-learners {ranks}"
        raise ConfigError(FLAG, parts, problem, f"Use at most {groups // ranks}.")


def _parts_need_no_others(config: TrainConfig) -> None:
    if config.flow.learner_parts == 1:
        return
    algo, flow = config.algo, config.flow
    name = algo.advantage_estimator
    whitens = f"looks at the whole batch; choose one of {', '.join(sorted(PER_GROUP_ESTIMATORS))}"
    tau = algo.m2po_tau is not None or algo.off_policy == "m2po"
    for flag, value, why in (
        ("--advantage-estimator", name not in PER_GROUP_ESTIMATORS and name, whitens),
        ("--ppo-epochs", algo.ppo_epochs > 1 and algo.ppo_epochs, "passes over the whole batch again; use 1"),
        ("--mini-batches", algo.mini_batches > 1 and algo.mini_batches, "spreads the whole batch over several updates; use 1"),
        ("--m2po-tau" if algo.m2po_tau is not None else "--off-policy", tau and (algo.m2po_tau or "m2po"), "looks at all tokens; use tis"),
        ("--aux-loss-coef", algo.aux_loss_coef, "counts the tokens of the whole batch; use 0"),
        ("--oversample", flow.oversample, "decides with the last group which are trained on; use 0, or --group-quorum"),
    ):
        if value:
            remedy = f"Leave it out, or change {flag}."
            raise ConfigError(FLAG, flow.learner_parts, f"does not go with {flag} {value}, which {why}", remedy)


PART_RULES: tuple[Callable[[TrainConfig], None], ...] = (_parts_have_groups, _parts_need_no_others)
