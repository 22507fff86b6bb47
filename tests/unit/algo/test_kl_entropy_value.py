import math

import pytest
import torch

from agentrl.algo.entropy import EntropyController
from agentrl.algo.kl import KLController, approximate_kl
from agentrl.algo.token_losses import value_loss
from agentrl.core.errors import ConfigError
from agentrl.learner.head import token_scores


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.10653)])
def test_golden_kl(estimator: str, expected: float) -> None:
    value = approximate_kl(torch.tensor([-1.0]), torch.tensor([-1.5]), estimator)
    assert float(value) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_is_finite_however_far_apart_the_policies_are(estimator: str) -> None:
    far = torch.tensor([300.0, -300.0, math.inf, -math.inf])
    values = approximate_kl(far, torch.zeros(4), estimator)
    assert values[:2].tolist() == values[2:].tolist()
    slope = {"k2": 20.0**0.5, "k3": math.exp(2.6108687) - 1.0}.get(estimator, 0.0)
    expected = {"k1": [100.0, -100.0], "k2": [10.0 + slope * (100.0 - slope)] * 2, "k3": [99.0, 10.0 + slope * (100.0 - 2.6108687)]}
    assert values[:2].tolist() == pytest.approx(expected[estimator], rel=1e-5)


@pytest.mark.parametrize("d", [-60.0, -12.0, -5.0, -2.7, -2.0, 2.0, 4.0, 4.6, 12.0, 60.0])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_gradient_of_kl_points_back_however_far_the_policy_moved(estimator: str, d: float) -> None:
    new = torch.tensor([d], requires_grad=True)
    value = approximate_kl(new, torch.zeros(1), estimator).sum()
    (slope,) = torch.autograd.grad(value, [new])
    exact = {"k1": (d, 1.0), "k2": (0.5 * d * d, d), "k3": (math.exp(-d) - 1.0 + d, 1.0 - math.exp(-d))}[estimator]
    if estimator == "k1" or abs(exact[0]) <= 10.0 or (estimator, d > 0) == ("k3", True):
        assert (value.item(), slope.item()) == pytest.approx(exact, rel=1e-5)
    else:
        assert 10.0 < value.item() < exact[0]
        assert slope.item() == pytest.approx(math.copysign(20.0**0.5 if estimator == "k2" else math.exp(2.6108687) - 1.0, d), rel=1e-5)


def test_k3_keeps_its_digits_between_nearly_equal_policies() -> None:
    """``exp(-d) - 1 + d`` in float32 would give 0 or 6e-8 here."""
    assert float(approximate_kl(torch.tensor([1e-4]), torch.zeros(1), "k3")) == pytest.approx(5e-9, rel=0.01)


def test_unknown_kl_estimator() -> None:
    with pytest.raises(ConfigError, match=r"--kl-estimator = 'k4'.*k1, k2, k3"):
        approximate_kl(torch.zeros(1), torch.zeros(1), "k4")


def test_a_fixed_coefficient_stays() -> None:
    controller = KLController(coefficient=0.1)
    assert controller.update(99.0, episodes=10_000) is controller


def test_a_kl_that_is_no_number_leaves_the_coefficient() -> None:
    controller = KLController(coefficient=0.1, target=1.0)
    assert controller.update(math.nan, episodes=10_000) is controller
    assert controller.update(math.inf, episodes=10_000).coefficient == pytest.approx(0.12)


def test_an_adaptive_coefficient_follows_the_error_up_to_a_fifth() -> None:
    controller = KLController(coefficient=1.0, target=2.0, horizon=100.0)
    assert controller.update(2.2, episodes=50).coefficient == pytest.approx(1.05)
    assert controller.update(50.0, episodes=100).coefficient == pytest.approx(1.2)
    assert controller.update(0.0, episodes=100).coefficient == pytest.approx(0.8)
    assert controller.coefficient == 1.0


def entropy(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return token_scores(logits, torch.zeros(len(logits), dtype=torch.long), temperature, True)[1]


def test_entropy_is_that_of_the_tempered_distribution() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, math.log(3.0), -1e9, -1e9]])
    torch.testing.assert_close(entropy(logits[:1], torch.ones(1)), torch.tensor([math.log(4.0)]))
    tempered = entropy(logits, torch.tensor([2.0, 0.5]))
    p = 9.0 / 10.0
    torch.testing.assert_close(tempered, torch.tensor([math.log(4.0), -p * math.log(p) - (1 - p) * math.log(1 - p)]))


def test_value_loss_takes_the_worse_of_clipped_and_free() -> None:
    new, old, returns = torch.tensor([1.0, 0.1, 3.0]), torch.zeros(3), torch.tensor([2.0, 2.0, 0.0])
    clipped = value_loss(new, old, returns, 0.2)
    torch.testing.assert_close(clipped.per_token, 0.5 * torch.tensor([1.8**2, 1.9**2, 3.0**2]))
    free = value_loss(new, old, returns, None)
    torch.testing.assert_close(free.per_token, 0.5 * torch.tensor([1.0, 1.9**2, 9.0]))
    stats = clipped.stats.result()
    assert stats["value/clip_fraction"] == pytest.approx(1 / 3)
    assert stats["value/error"] == pytest.approx((1.0 + 1.9**2 + 9.0) / 3, rel=1e-6)
    assert (stats["value/mean"], stats["value/return_mean"]) == pytest.approx((4.1 / 3, 4.0 / 3), rel=1e-6)


def test_a_clipped_value_has_no_gradient() -> None:
    new = torch.tensor([1.0], requires_grad=True)
    value_loss(new, torch.zeros(1), torch.tensor([2.0]), 0.2).per_token.sum().backward()
    assert new.grad is not None
    assert float(new.grad) == 0.0


def test_a_fixed_entropy_bonus_stays() -> None:
    controller = EntropyController(coefficient=0.1)
    assert controller.update(5.0) is controller
    assert controller.in_force == 0.1


def test_the_entropy_bonus_as_in_skywork() -> None:
    """c grows by the change below the target and falls above it, and is in force at most at the target."""
    controller, seen = EntropyController(coefficient=0.0, target=0.2, change=0.005), []
    for entropy in (0.1, 0.15, 0.2, 0.3, math.nan, 0.25, 0.1):
        controller = controller.update(entropy)
        seen.append((round(controller.coefficient, 9), round(controller.in_force, 9)))
    assert seen == [(0.005, 0.005), (0.01, 0.01), (0.01, 0.01), (0.005, 0.0), (0.005, 0.0), (0.0, 0.0), (0.005, 0.005)]
    assert EntropyController(coefficient=0.001, target=0.2).update(0.5).coefficient == 0.0
