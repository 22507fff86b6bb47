"""What the learner gives an estimator beside rewards: turns, components of the reward, and the judgement of a teacher."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from agentrl.algo.advantages import AdvantageInputs
from agentrl.algo.compute import compute_advantages
from agentrl.learner.batch import collate
from tests.learner_support import action_targets, gradients, largest_difference, make_settings, write_model
from tests.unit.algo.chosen import estimator_options
from tests.unit.learner.test_algorithms import GROUPS, logprobs, started


@pytest.mark.parametrize("name", ["turn_norm", "gdpo"])
def test_the_estimator_is_given_turns_and_components(tiny_model: str, name: str) -> None:
    named = tuple(
        replace(g, trajectories=tuple(replace(t, reward_parts={"a": float(i), "b": float(i % 2)}) for i, t in enumerate(g.trajectories)))
        for g in GROUPS
    )
    learner = started(tiny_model, algo={"advantage_estimator": name, "gdpo_weights": ("a=1", "b=-2") if name == "gdpo" else ()})
    found = learner.train(0, *named).metrics["advantage/abs"]
    learner.close()
    batch = collate(named)
    inputs = AdvantageInputs(
        token_rewards=batch.token_rewards,
        episode=batch.episode,
        group=batch.group,
        rewards=batch.rewards,
        turn=torch.cat([torch.full((len(turn.token_ids),), n) for n, turn in enumerate(t for row in batch.rows for t in row.turns)]),
        parts={"a": torch.tensor([0.0, 1.0, 2.0] * 4), "b": torch.tensor([0.0, 1.0, 0.0] * 4)},
    )
    expected = compute_advantages(name, inputs, estimator_options(name, gdpo_weights=("a=1", "b=-2")))
    assert found == pytest.approx(float(expected.advantages.abs().mean()), rel=1e-5)


@pytest.mark.parametrize(("name", "coefficient"), [("distillation", 1.0), ("group_norm", 0.3)])
def test_a_teacher_adds_its_log_probability_less_that_of_the_policy(tiny_model: str, tmp_path: Path, name: str, coefficient: float) -> None:
    """Against the written-out step: the policy gradient with the reverse KL of each token taken off the advantages."""
    other = write_model(tmp_path / "teacher", seed=5, hidden_size=16)
    algo = {"advantage_estimator": name, "teacher": other, "teacher_coef": coefficient}
    found = gradients(make_settings(tiny_model, algo=algo), GROUPS)
    batch = collate(GROUPS)
    targets = action_targets(batch)[:, None]
    with torch.no_grad():
        theirs = logprobs(other)[1].gather(-1, targets)[:, 0]
    model, scores = logprobs(tiny_model)
    new = scores.gather(-1, targets)[:, 0]
    rewards = [batch.rewards[batch.group == g].double() for g in range(4)]
    earned = torch.cat([(r - r.mean()) / (r.std() + 1e-9) for r in rewards])[batch.episode] if name == "group_norm" else 0.0
    weights = (new.detach() - batch.logprobs).exp().clamp(max=2.0)
    (-weights * (earned - coefficient * (new.detach() - theirs)) * new).mean().backward()
    expected = {f"model.{key}": parameter.grad for key, parameter in model.named_parameters()}
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-2
    assert largest_difference(found, expected) < 1e-5


@pytest.mark.parametrize("stage", [0, 3])
def test_a_policy_that_is_its_own_teacher_learns_nothing(tiny_model: str, stage: int) -> None:
    learner = started(tiny_model, learner={"zero_stage": stage}, algo={"advantage_estimator": "distillation", "teacher": tiny_model})
    metrics = learner.train(0, *GROUPS).metrics
    learner.close()
    assert metrics["distill/kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(0.0, abs=1e-5)
