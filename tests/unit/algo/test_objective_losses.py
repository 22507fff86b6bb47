"""Losses against their formulas, written out with plain Python numbers."""

from __future__ import annotations

import math

import pytest
import torch

from agentrl.algo.objectives.distill import generalized_jsd
from agentrl.algo.objectives.dpo import PAIR_LOSSES, PairRatios
from agentrl.algo.objectives.orpo import odds_ratio
from agentrl.algo.objectives.process_reward_model import step_cross_entropy

CHOSEN, REJECTED = [0.7, -1.3, 2.0, -40.0], [-0.2, 0.4, 2.0, 35.0]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def pairs() -> PairRatios:
    chosen, rejected = (torch.tensor(values, dtype=torch.float64) for values in (CHOSEN, REJECTED))
    return PairRatios(chosen, rejected, torch.zeros(4), torch.zeros(4), torch.ones(4), torch.ones(4))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_conservative_dpo_is_its_formula(smoothing: float):
    found = PAIR_LOSSES["cdpo"](pairs(), 0.3, smoothing)
    for value, good, bad in zip(found.tolist(), CHOSEN, REJECTED, strict=True):
        difference = 0.3 * (good - bad)
        expected = -(1 - smoothing) * math.log(sigmoid(difference)) - smoothing * math.log(sigmoid(-difference))
        assert value == pytest.approx(expected, abs=1e-6)


def test_without_smoothing_it_is_dpo():
    torch.testing.assert_close(
        PAIR_LOSSES["cdpo"](pairs(), 0.1, 0.0), -torch.nn.functional.logsigmoid(0.1 * (pairs().policy_chosen - pairs().policy_rejected))
    )


def test_identity_preference_is_its_formula():
    found = PAIR_LOSSES["ipo_sum"](pairs(), 0.2, 0.0)
    assert found.tolist() == pytest.approx([(good - bad - 1 / 0.4) ** 2 for good, bad in zip(CHOSEN, REJECTED, strict=True)], abs=1e-6)


def test_the_odds_ratio_and_its_loss_are_their_formulas():
    chosen, rejected = [-0.1, -2.0, -0.7, -9.0], [-0.5, -0.01, -0.7, -0.3]
    losses, log_odds = odds_ratio(torch.tensor(chosen, dtype=torch.float64), torch.tensor(rejected, dtype=torch.float64))
    for loss, ratio, good, bad in zip(losses.tolist(), log_odds.tolist(), chosen, rejected, strict=True):
        p, q = math.exp(good), math.exp(bad)
        expected = math.log((p / (1 - p)) / (q / (1 - q)))
        assert ratio == pytest.approx(expected, abs=1e-6)
        assert loss == pytest.approx(-math.log(sigmoid(expected)), abs=1e-6)


def test_an_answer_that_is_certain_leaves_the_odds_ratio_finite():
    losses, log_odds = odds_ratio(torch.tensor([0.0, -1e-9]), torch.tensor([-1.0, -50.0]))
    assert torch.isfinite(losses).all()
    assert ((log_odds > 0) & torch.isfinite(log_odds)).all()


def test_cross_entropy_of_steps_is_its_formula_also_for_soft_labels():
    logits = torch.tensor([[0.3, -0.8], [2.0, 1.0], [-3.0, 3.0]], dtype=torch.float64)
    labels = torch.tensor([1.0, 0.0, 0.25])
    for loss, (bad, good), label in zip(step_cross_entropy(logits, labels).tolist(), logits.tolist(), labels.tolist(), strict=True):
        p = math.exp(good) / (math.exp(good) + math.exp(bad))
        assert loss == pytest.approx(-(label * math.log(p) + (1 - label) * math.log(1 - p)), abs=1e-6)


def written_out_divergence(student: list[float], teacher: list[float], beta: float, temperature: float) -> float:
    def probabilities(logits: list[float]) -> list[float]:
        powers = [math.exp(logit / temperature) for logit in logits]
        return [power / sum(powers) for power in powers]

    q, p = probabilities(student), probabilities(teacher)
    mixture = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]

    def kl(first: list[float], second: list[float]) -> float:
        return sum(a * math.log(a / b) for a, b in zip(first, second, strict=True))

    if beta in (0, 1):
        return kl(p, q) if beta == 0 else kl(q, p)
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_generalized_divergence_is_its_formula(beta: float, temperature: float):
    generator = torch.Generator().manual_seed(3)
    student, teacher = torch.randn(5, 7, generator=generator), torch.randn(5, 7, generator=generator)
    found = generalized_jsd(student, teacher, beta=beta, temperature=temperature)
    for value, mine, theirs in zip(found.tolist(), student.tolist(), teacher.tolist(), strict=True):
        assert value == pytest.approx(written_out_divergence(mine, theirs, beta, temperature), abs=1e-6)
