"""``--learner-parts`` is refused where a part would need the groups of another."""

from __future__ import annotations

import re

import pytest

from agentrl.config.load import load_config
from agentrl.config.schema import PER_GROUP_ESTIMATORS
from agentrl.core.errors import ConfigError

BASE = ["--agent", "module:Name", "--groups-per-step", "8"]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--advantage-estimator", "gae"], "--advantage-estimator gae.*choose one of dr_grpo, group_norm, grpo, rloo"),
        (["--advantage-estimator", "reinforce"], "--advantage-estimator reinforce, .*whole batch"),
        (["--advantage-estimator", "reinforce_baseline"], "--advantage-estimator reinforce_baseline"),
        (["--ppo-epochs", "2"], "--ppo-epochs 2.*use 1"),
        (["--mini-batches", "2"], "--mini-batches 2.*use 1"),
        (["--off-policy", "m2po"], "--off-policy m2po"),
        (["--m2po-tau", "0.1"], "--m2po-tau 0.1"),
        (["--aux-loss-coef", "0.1"], "--aux-loss-coef 0.1"),
        (["--oversample", "0.25"], "--oversample 0.25"),
        (["--num-learners", "4"], "--num-learners 4.*at most 2"),
        (["--groups-per-step", "2"], "--groups-per-step 2.*at most 2"),
    ],
)
def test_what_looks_beyond_a_part_is_refused(args: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([*BASE, "--learner-parts", "4", *args])
    assert (caught.value.field, caught.value.value) == ("--learner-parts", 4)
    assert re.search(told, str(caught.value), re.DOTALL), str(caught.value)
    load_config([*BASE, *args])


@pytest.mark.parametrize("estimator", sorted(PER_GROUP_ESTIMATORS))
@pytest.mark.parametrize("args", [["--init-kl-coef", "0.1"], ["--dynamic-filtering", "--async"], ["--learner-parts", "8"]])
def test_what_stays_within_a_group_is_allowed(estimator: str, args: list[str]) -> None:
    assert load_config([*BASE, "--learner-parts", "4", "--advantage-estimator", estimator, *args]).flow.learner_parts >= 4
