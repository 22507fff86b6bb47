"""Bounds and defaults of estimators and corrections: clipped rewards, groups smaller than k, the numbers that a preset stands for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algo.advantages import AdvantageInputs, AdvantageOptions
from agentrl.algo.compute import compute_advantages
from agentrl.algo.corrections import correction_facts
from agentrl.algo.corrections.ratios import RatioOptions
from agentrl.algo.estimators import estimator_facts, find_estimator
from agentrl.algo.facts import ESTIMATOR, advantage_estimator, calls
from agentrl.algo.filters import reject_flat
from agentrl.algo.losses import loss_facts
from agentrl.algo.options import checked_options
from agentrl.algo.statistics import record_extremes, record_means, segment_count, segment_mean, segment_std
from agentrl.core.errors import BatchError, ConfigError, PluginError
from agentrl.core.metrics import MetricSums
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import Status
from tests.unit.algo.chosen import correction_inputs, estimator_options
from tests.unit.flow.fakes import member


def one_token_each(rewards: list[float], groups: list[int], **more: Any) -> AdvantageInputs:
    """Episodes of one action token."""
    earned = torch.tensor(rewards)
    return AdvantageInputs(token_rewards=earned, episode=torch.arange(len(rewards)), group=torch.tensor(groups), rewards=earned, **more)


def advantages(name: str, inputs: AdvantageInputs, **options: Any) -> Tensor:
    return compute_advantages(name, inputs, estimator_options(name, **options)).advantages


def test_pass_at_k_of_a_group_that_is_smaller_than_k_is_that_of_its_size() -> None:
    inputs = one_token_each([1.0, 0.0, 3.0, 0.0, 1.0], [0, 0, 0, 1, 1])
    found = advantages("pass_at_k", inputs, pass_at_k=4, advantage_std_norm=False)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, 2.0, 0.0, 1.0]))


@pytest.mark.parametrize("name", ["pass_at_k", "batch_std", "group_norm", "rloo"])
@pytest.mark.filterwarnings("error")
def test_a_group_of_one_has_no_advantage(name: str) -> None:
    assert advantages(name, one_token_each([1.0], [0]), pass_at_k=2).tolist() == [0.0]


@pytest.mark.parametrize("name", ["pass_at_k", "batch_std", "group_norm"])
def test_rewards_that_differ_by_rounding_are_equal(name: str) -> None:
    tenth = torch.tensor(0.1)
    above = torch.nextafter(tenth, torch.tensor(1.0))
    assert advantages(name, one_token_each([float(tenth), float(above)], [0, 0])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["group_norm", "dr_grpo", "rloo", "opo", "batch_std", "pass_at_k", "reinforce_baseline"])
def test_rewards_are_clipped_before_the_baseline(name: str) -> None:
    groups, options = [0, 0, 0, 1, 1, 1], {"reward_clip_range": (-1.0, 1.0)}
    wild, clipped = [9.0, 0.5, -7.0, 0.2, 4.0, 0.1], [1.0, 0.5, -1.0, 0.2, 1.0, 0.1]
    torch.testing.assert_close(
        advantages(name, one_token_each(wild, groups), **options), advantages(name, one_token_each(clipped, groups), **options)
    )


def test_components_are_clipped_before_gdpo_compares_them() -> None:
    def found(right: list[float]) -> Tensor:
        parts = {"right": torch.tensor(right), "form": torch.tensor([0.0, 1.0, 0.5, 0.0])}
        return advantages("gdpo", one_token_each([0.0] * 4, [0, 0, 0, 0], parts=parts), reward_clip_range=(-1.0, 1.0))

    torch.testing.assert_close(found([8.0, 0.5, -6.0, 0.0]), found([1.0, 0.5, -1.0, 0.0]))


def test_gdpo_adds_all_components_and_whitens_the_sum() -> None:
    parts = {"right": torch.tensor([0.0, 1.0, 0.0, 1.0]), "form": torch.tensor([0.0, 0.0, 1.0, 1.0])}
    found = advantages("gdpo", one_token_each([0.0] * 4, [0, 0, 0, 0], parts=parts))
    torch.testing.assert_close(found, torch.tensor([-math.sqrt(2), 0.0, 0.0, math.sqrt(2)]), atol=1e-6, rtol=0)


def test_gdpo_refuses_a_weight_without_its_component_and_a_name_given_twice() -> None:
    inputs = one_token_each([0.0, 1.0], [0, 0], parts={"right": torch.tensor([0.0, 1.0])})
    with pytest.raises(BatchError, match="form missing"):
        advantages("gdpo", inputs, gdpo_weights=("right=1", "form=1"))
    with pytest.raises(ConfigError, match="name of its own"):
        estimator_options("gdpo", gdpo_weights=("right=1", "right=2"))


def test_the_greedy_reward_of_remax_is_clipped_as_the_others() -> None:
    inputs = one_token_each([9.0, 0.0], [0, 0], baseline=torch.tensor([7.0, -7.0]))
    assert advantages("remax", inputs, reward_clip_range=(-1.0, 1.0)).tolist() == [0.0, 1.0]


def test_the_range_of_rewards_must_contain_0() -> None:
    for bounds in ((0.5, 1.0), (-1.0, -0.5)):
        with pytest.raises(ConfigError, match="must contain 0"):
            estimator_options("rloo", reward_clip_range=bounds)


def test_whitening_survives_equal_advantages_and_an_empty_batch() -> None:
    assert advantages("reinforce", one_token_each([1.0, 1.0], [0, 1])).tolist() == [0.0, 0.0]
    assert advantages("reinforce", one_token_each([], [])).tolist() == []


def test_equality_of_rewards_is_judged_by_their_size() -> None:
    """Rewards of a millionth differ as much from each other as those of one."""
    small = advantages("group_norm", one_token_each([1e-7, 3e-7], [0, 0]))
    assert small.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=0.02)


def test_distillation_teaches_nothing_but_what_the_teacher_adds() -> None:
    assert advantages("distillation", one_token_each([1.0, -2.0], [0, 0])).tolist() == [0.0, 0.0]
    assert estimator_facts("distillation").needs_teacher


def test_facts_that_flags_are_held_against() -> None:
    assert [name for name in ("remax", "rloo", "gdpo") if estimator_facts(name).greedy_baseline] == ["remax"]
    assert [name for name in ("reinforce", "ppo", "gspo") if loss_facts(name).single_update] == ["reinforce"]


@pytest.mark.parametrize(
    ("name", "level", "mode", "bounds", "opsm_delta", "m2po_tau"),
    [
        ("tis", "token", "truncate", (0.0, 2.0), None, None),
        ("seq-tis", "seq", "truncate", (0.0, 2.0), None, None),
        ("icepop", "token", "mask", (0.5, 5.0), None, None),
        ("seq-mask-tis", "geo", "mask", (0.99, 1.01), None, None),
        ("decoupled", "token", "truncate", (0.0, 10.0), None, None),
        ("opsm", "token", "truncate", (0.0, 2.0), 0.05, None),
        ("m2po", "token", "truncate", (0.0, math.inf), None, 0.04),
        ("none", "token", "none", (0.0, 2.0), None, None),
    ],
)
def test_the_numbers_that_a_correction_stands_for(
    name: str, level: str, mode: str, bounds: tuple[float, float], opsm_delta: float | None, m2po_tau: float | None
) -> None:
    chosen: RatioOptions = correction_facts(name).options()
    assert (chosen.off_policy_level, chosen.off_policy_mode, chosen.off_policy_range) == (level, mode, bounds)
    assert (chosen.opsm_delta, chosen.m2po_tau) == (opsm_delta, m2po_tau)


def test_inputs_of_a_correction_have_one_length() -> None:
    ones, flags = torch.ones(3), torch.ones(3, dtype=torch.bool)
    with pytest.raises(BatchError, match="advantages has shape"):
        correction_inputs(ones, ones, torch.zeros(3, dtype=torch.long), flags, torch.ones(2))


def test_segments_without_entries_count_nothing() -> None:
    index = torch.tensor([0, 0, 2])
    assert segment_count(index, 4).tolist() == [2, 0, 1, 0]
    assert segment_mean(torch.tensor([1.0, 3.0, 5.0]), index, 4).tolist() == [2.0, 0.0, 5.0, 0.0]
    assert segment_std(torch.tensor([1.0, 5.0, 5.0]), index, 4).tolist() == pytest.approx([math.sqrt(8), 0.0, 0.0, 0.0])


def test_extremes_are_signed_and_an_empty_tensor_has_none() -> None:
    stats = MetricSums()
    record_extremes(stats, highs={"high": torch.tensor([-3.0, 1.0]), "none": torch.zeros(0)}, lows={"low": torch.tensor([-3.0, 1.0])})
    record_means(stats, {"first": (torch.tensor(6.0), torch.tensor(2.0)), "second": (torch.tensor(8.0), torch.tensor(8.0))})
    assert stats.result() == {"high": 1.0, "low": -3.0, "first": 3.0, "second": 1.0}


@advantage_estimator
def tall(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """One column instead of one number per token."""
    return inputs.token_rewards[:, None]


def test_advantages_have_one_dimension() -> None:
    with pytest.raises(PluginError, match=r"of shape \(2, 1\)"):
        compute_advantages(tall, one_token_each([1.0, 0.0], [0, 0]), AdvantageOptions())


def test_an_exception_in_a_built_in_algorithm_is_not_blamed_on_the_user() -> None:
    with pytest.raises(ZeroDivisionError), calls(ESTIMATOR, find_estimator("rloo")):
        _ = 1 / 0
    with pytest.raises(PluginError, match="tall"), calls(ESTIMATOR, tall):
        _ = 1 / 0


def test_an_error_that_names_its_field_already_goes_through() -> None:
    with pytest.raises(ConfigError, match="--some-flag"), calls(ESTIMATOR, tall):
        raise ConfigError("--some-flag", 1, "is wrong", "Correct it")


def test_a_class_is_no_algorithm(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine: ...\n")
    with pytest.raises(ConfigError, match="Mine is a class, not a function"):
        find_estimator(f"{tmp_path / 'mine.py'}:Mine")


@dataclass(frozen=True, kw_only=True)
class Made(AdvantageOptions):
    """Options of which one is made anew each time."""

    names: dict[str, float] = field(default_factory=dict)


def test_an_option_may_have_a_default_that_is_made() -> None:
    assert checked_options(Made, AdvantageOptions) is Made


def test_a_group_without_rewards_is_not_judged_by_them() -> None:
    failed = replace(member(0.0), status=Status.TIMEOUT, reward=None, score=None)
    assert reject_flat(GroupSummary(group_id=0, members=(failed, failed), versions=None, seconds=1.0), lambda group: True) is None
