"""A step that comes in parts does what the same step does as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.algo.advantages import ESTIMATORS, AdvantageInputs, AdvantageOptions, compute_advantages
from agentrl.algo.aggregation import AGGREGATIONS, Denominators, aggregate, part_weight
from agentrl.config.schema import PER_GROUP_ESTIMATORS
from agentrl.core.errors import LearnerError
from agentrl.core.types import Group
from agentrl.learner.batch import Batch, collate
from agentrl.learner.learner import LearnerRank
from tests.learner_support import CollectingSender, largest_difference, make_groups, make_settings

GROUPS = make_groups(5, 3, seed=1)
KL_LOSS = {"init_kl_coef": 0.3, "use_kl_loss": True, "kl_estimator": "k2"}
LAYOUT = ("time/", "padding", "shared_prompts", "micro_batches")
"""Metrics that say how a batch was laid out."""

Steps = tuple[dict[str, torch.Tensor], list[dict[str, float]], dict[str, torch.Tensor]]


def trained(model: str, cuts: Sequence[int] | None, *, steps: int = 1, **changes: Any) -> Steps:
    """Gradients that Adam was given in the first step, metrics of all steps, final weights; parts end at `cuts`, `None`: a whole."""
    learner = LearnerRank(make_settings(model, **changes), CollectingSender())
    learner.start(0, 1, 0)
    applied: dict[str, torch.Tensor] = {}
    rows = []

    def look(adam: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        found = [p.grad for group in adam.param_groups for p in group["params"] if p.grad is not None]
        if not rows:
            applied.update({str(number): gradient.clone() for number, gradient in enumerate(found)})

    optimizer = learner._started.models.policy.engine.optimizer
    getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(look)
    try:
        for step in range(steps):
            groups = make_groups(5, 3, seed=1 + step, version=step)
            rows.append(dict(in_parts(learner, step, groups, cuts)))
        weights = {name: tensor.detach().clone() for name, tensor in learner._started.named_weights()}
    finally:
        learner.close()
    return applied, rows, weights


def in_parts(learner: LearnerRank, step: int, groups: tuple[Group, ...], cuts: Sequence[int] | None) -> Any:
    if cuts is None:
        return learner.train(step, *groups).metrics
    bounds = [0, *cuts]
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        result = learner.train_part(step, number == 0, number == len(cuts) - 1, *groups[begin:end])
        assert bool(result.metrics) == (number == len(cuts) - 1)
    return result.metrics


def assert_same(whole: Steps, parts: Steps, tolerance: float = 1e-5) -> None:
    assert max(float(gradient.abs().max()) for gradient in whole[0].values()) > 1e-3
    assert largest_difference(whole[0], parts[0]) < tolerance
    for one, other in zip(whole[1], parts[1], strict=True):
        assert one.keys() == other.keys()
        for name in one:
            if not name.startswith(LAYOUT):
                assert other[name] == pytest.approx(one[name], rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("max_grad_norm", [1e9, 0.05])
def test_parts_give_the_gradient_and_metrics_of_the_whole(tiny_model: str, stage: int, max_grad_norm: float) -> None:
    learner = {"zero_stage": stage, "max_grad_norm": max_grad_norm, "micro_batch_tokens": 60, "learning_rate": 1e-4}
    whole, parts = (trained(tiny_model, cuts, steps=3, learner=learner) for cuts in (None, [2, 4, 5]))
    assert_same((whole[0], whole[1][:1], {}), (parts[0], parts[1][:1], {}))
    # Adam enlarges the rounding of tiny gradients, and at a large learning rate that shows, whatever the order of summation.
    assert largest_difference(whole[2], parts[2]) < 1e-4


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_in_bfloat16_too(tiny_model: str, stage: int) -> None:
    learner = {"zero_stage": stage, "max_grad_norm": 0.05, "learner_dtype": "bfloat16"}
    whole, parts = (trained(tiny_model, cuts, learner=learner) for cuts in (None, [2, 4, 5]))
    largest = max(float(gradient.abs().max()) for gradient in whole[0].values())
    assert largest_difference(whole[0], parts[0]) < 0.05 * largest
    assert parts[1][0]["grad_norm"] == pytest.approx(whole[1][0]["grad_norm"], rel=0.02)
    assert parts[1][0]["loss"] == pytest.approx(whole[1][0]["loss"], abs=2e-3)


@pytest.mark.parametrize("estimator", sorted(PER_GROUP_ESTIMATORS))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_with_each_estimator_and_aggregation(tiny_model: str, estimator: str, aggregation: str) -> None:
    algo = {"advantage_estimator": estimator, "loss_aggregation": aggregation, "entropy_coef": 0.1, **KL_LOSS}
    assert_same(*(trained(tiny_model, cuts, algo=algo) for cuts in (None, [1, 3, 5])))


@pytest.mark.parametrize(
    "algo",
    [
        {"init_kl_coef": 0.3},
        {"init_kl_coef": 0.3, "kl_target": 0.1},
        {"reuse_behaviour_logprobs": True},
        {"off_policy": "opsm"},
        {"off_policy": "seq-mask-tis", "off_policy_range": (0.2, 5.0)},
        {"policy_loss": "gspo"},
    ],
    ids=str,
)
def test_with_what_looks_at_a_group_or_less(tiny_model: str, algo: dict[str, Any]) -> None:
    whole, parts = (trained(tiny_model, cuts, steps=2, algo=algo, learner={"learning_rate": 1e-4}) for cuts in (None, [1, 3, 5]))
    assert_same((whole[0], whole[1][:1], {}), (parts[0], parts[1][:1], {}))
    coefficients = [rows[1].get("kl/coefficient", 0.0) for _, rows, _ in (whole, parts)]
    assert coefficients[1] == pytest.approx(coefficients[0], rel=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_last_part_may_be_empty(tiny_model: str, stage: int) -> None:
    learner = {"zero_stage": stage}
    assert_same(*(trained(tiny_model, cuts, algo=KL_LOSS, learner=learner) for cuts in (None, [3, 5, 5])))


def test_the_same_parts_give_the_same_bits(tiny_model: str) -> None:
    once, again = (trained(tiny_model, [2, 4, 5], steps=2) for _ in range(2))
    assert largest_difference(once[2], again[2]) == 0.0


def test_ages_are_shares_of_the_whole_batch(tiny_model: str) -> None:
    learner = LearnerRank(make_settings(tiny_model), CollectingSender())
    learner.start(0, 1, 0)
    old, new = make_groups(2, 3, version=0), make_groups(3, 3, version=1)
    learner.train_part(1, True, False, *old)
    metrics = learner.train_part(1, False, True, *new).metrics
    learner.close()
    older, newer = collate(old).num_actions, collate(new).num_actions
    assert metrics["staleness/share_1"] == pytest.approx(older / (older + newer))
    assert metrics["staleness/share_0"] == pytest.approx(newer / (older + newer))
    assert (metrics["groups"], metrics["episodes"]) == (5, 15)


def test_a_gradient_that_is_not_finite_is_skipped_as_a_whole(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.learner.engine import TrainEngine

    accumulate = TrainEngine.accumulate
    learner = LearnerRank(make_settings(tiny_model), CollectingSender())
    learner.start(0, 1, 0)
    with monkeypatch.context() as broken:
        broken.setattr(TrainEngine, "accumulate", lambda self, loss, last: accumulate(self, loss * float("nan"), last=last))
        learner.train_part(0, True, False, *GROUPS[:2])
    assert learner.train_part(0, False, True, *GROUPS[2:]).metrics["skipped_updates"] == 1
    healthy = in_parts(learner, 1, GROUPS, [2, 5])
    learner.close()
    assert healthy["skipped_updates"] == 0
    assert healthy["grad_norm"] > 0


@pytest.mark.parametrize(("first", "step", "told"), [(True, 0, "step 0 is"), (False, 1, "step 0 is")])
def test_parts_of_two_steps_are_not_mixed(tiny_model: str, first: bool, step: int, told: str) -> None:
    learner = LearnerRank(make_settings(tiny_model), CollectingSender())
    learner.start(0, 1, 0)
    with pytest.raises(LearnerError, match=r"a later part of step 0 .* no step is under way"):
        learner.train_part(0, False, True, *GROUPS)
    learner.train_part(0, True, False, *GROUPS[:2])
    with pytest.raises(LearnerError, match=f"part of step {step} .* {told} under way"):
        learner.train_part(step, first, True, *GROUPS[2:])
    with pytest.raises(LearnerError, match="step 0 is under way"):
        learner.train(0, *GROUPS)
    learner.close()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_checkpoint_between_parts_is_that_of_the_step_before(tiny_model: str, tmp_path: Path, stage: int) -> None:
    """Resumed, the step is taken from its beginning, and ends with the bits it would have ended with."""
    settings = make_settings(tiny_model, learner={"zero_stage": stage, "ema_decay": 0.5})
    groups = [make_groups(5, 3, seed=1 + step, version=step) for step in range(2)]
    learner = LearnerRank(settings, CollectingSender())
    learner.start(0, 1, 0)
    in_parts(learner, 0, groups[0], [2, 5])
    learner.train_part(1, True, False, *groups[1][:2])
    learner.save_checkpoint(str(tmp_path), 1)
    learner.train_part(1, False, True, *groups[1][2:])
    weights = {name: tensor.clone() for name, tensor in learner._started.named_weights()}
    learner.close()
    again = LearnerRank(settings, CollectingSender())
    again.start(0, 1, 0)
    assert again.load_checkpoint(str(tmp_path)) == 1
    in_parts(again, 1, groups[1], [2, 5])
    assert largest_difference(weights, dict(again._started.named_weights())) == 0.0
    again.close()


def test_a_checkpoint_between_parts_has_the_generators_of_the_beginning(tiny_model: str, tmp_path: Path) -> None:
    learner = LearnerRank(make_settings(tiny_model), CollectingSender())
    learner.start(0, 1, 0)
    states = torch.get_rng_state()
    learner.train_part(0, True, False, *GROUPS[:2])
    torch.rand(3)  # as dropout would
    learner.save_checkpoint(str(tmp_path), 0)
    learner.load_checkpoint(str(tmp_path))
    assert torch.equal(torch.get_rng_state(), states)
    learner.close()


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_weighted_mean_of_parts_is_the_whole(mode: str) -> None:
    per_token, length = torch.tensor([1.0, -2.0, 3.0, 5.0]), torch.tensor([2.0, 2.0, 1.0, 1.0])

    def loss(at: slice, tokens: float, episodes: float) -> tuple[float, float]:
        sizes = Denominators(tokens=tokens, episodes=episodes, constant=16.0)
        share = aggregate(per_token[at], episode_length=length[at], mode=mode, denominators=sizes)
        return float(share), part_weight(mode, sizes)

    (one, weight), (other, rest) = loss(slice(0, 2), 2.0, 1.0), loss(slice(2, 4), 2.0, 2.0)
    whole, both = loss(slice(0, 4), 4.0, 3.0)
    assert weight + rest == pytest.approx(both)
    assert (weight * one + rest * other) / both == pytest.approx(whole)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_estimators_that_may_come_in_parts_are_those_that_look_at_a_group_only(name: str) -> None:
    def advantages(groups: Sequence[Group]) -> torch.Tensor:
        batch: Batch = collate(groups)
        inputs = AdvantageInputs(
            token_rewards=batch.token_rewards,
            episode=batch.episode,
            group=batch.group,
            rewards=batch.rewards,
            values=torch.zeros_like(batch.logprobs),
        )
        return compute_advantages(name, inputs, AdvantageOptions()).advantages

    same = torch.equal(advantages(GROUPS), torch.cat([advantages(GROUPS[:2]), advantages(GROUPS[2:])]))
    assert same == (name in PER_GROUP_ESTIMATORS)
