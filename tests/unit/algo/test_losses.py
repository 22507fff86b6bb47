import math

import pytest
import torch

from agentrl.algo.compute import compute_policy_loss
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.losses.ppo import PpoOptions
from agentrl.algo.token_losses import LossInputs
from agentrl.core.errors import BatchError, ConfigError
from tests.unit.algo.chosen import loss_options
from tests.unit.algo.ragged import gradient

ZERO = torch.zeros(1, dtype=torch.long)


def slope(name: str, ratio: float, advantage: float, options: PpoOptions | None = None) -> float:
    """Derivative of one token's loss by its log-probability."""
    old = torch.tensor([-1.0])

    def loss(new: torch.Tensor) -> torch.Tensor:
        inputs = LossInputs(new=new, old=old, advantages=torch.tensor([advantage]), sequence=ZERO, selected=ZERO.bool())
        return compute_policy_loss(name, inputs, options or loss_options(name)).per_token.sum()

    return float(gradient(loss, old + math.log(ratio))[1])


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_every_loss_is_the_policy_gradient(name: str) -> None:
    assert slope(name, 1.0, 2.0) == pytest.approx(-2.0)
    assert slope(name, 1.0, -2.0) == pytest.approx(2.0)


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_clipping_removes_the_gradient_only_where_it_would_go_further(name: str) -> None:
    assert slope(name, 1.5, 1.0) == 0.0
    assert slope(name, 0.5, -1.0) == 0.0
    assert slope(name, 1.5, -1.0) == pytest.approx(1.5)
    assert slope(name, 0.5, 1.0) == pytest.approx(-0.5)


def test_clip_higher_leaves_more_room_upwards() -> None:
    assert slope("ppo", 1.25, 1.0) == 0.0
    assert slope("ppo", 1.25, 1.0, PpoOptions(eps_clip_high=0.28)) == pytest.approx(-1.25)
    assert slope("ppo", 0.75, -1.0, PpoOptions(eps_clip_high=0.28)) == 0.0


def test_dual_clip_stops_large_ratios_of_negative_advantages() -> None:
    options = PpoOptions(dual_clip=3.0)
    assert slope("ppo", 5.0, -1.0, options) == 0.0
    assert slope("ppo", 2.5, -1.0, options) == pytest.approx(2.5)
    assert slope("ppo", 5.0, -1.0) == pytest.approx(5.0)


def test_cispo_keeps_a_bounded_gradient_for_clipped_tokens() -> None:
    assert slope("cispo", 5.0, 1.0) == pytest.approx(-1.2)
    assert slope("cispo", 0.1, 1.0) == pytest.approx(-0.8)


def test_reinforce_ignores_the_ratio() -> None:
    assert slope("reinforce", 7.0, 1.0) == pytest.approx(-1.0)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_extreme_ratios_stay_finite(name: str) -> None:
    for ratio in (1e-30, 1e30):
        for advantage in (-1.0, 1.0):
            assert math.isfinite(slope(name, ratio, advantage))


def test_gspo_clips_whole_sequences() -> None:
    old = torch.zeros(4)
    log_ratio = torch.tensor([1.0, -1.0, 0.5, 0.5])  # means 0 and 0.5
    sequence = torch.tensor([0, 0, 1, 1])

    def loss(new: torch.Tensor) -> torch.Tensor:
        return compute_policy_loss(
            "gspo", LossInputs(new=new, old=old, advantages=torch.ones(4), sequence=sequence), loss_options("gspo")
        ).per_token.sum()

    torch.testing.assert_close(gradient(loss, log_ratio)[1], torch.tensor([-1.0, -1.0, 0.0, 0.0]))


def test_statistics() -> None:
    ratio = torch.tensor([1.5, 1.0, 0.5, 4.0])
    inputs = LossInputs(
        new=ratio.log(), old=torch.zeros(4), advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]), sequence=torch.zeros(4, dtype=torch.long)
    )
    stats = compute_policy_loss("ppo", inputs, loss_options("ppo", dual_clip=3.0)).stats.result()
    assert stats["policy/clip_fraction"] == 0.5
    assert stats["policy/clip_fraction_positive"] == 0.5
    assert stats["policy/clip_fraction_negative"] == 0.5
    assert stats["policy/dual_clip_fraction"] == 0.5
    assert stats["policy/ratio_mean"] == pytest.approx(1.75)
    assert (stats["policy/ratio_max"], stats["policy/ratio_min"]) == pytest.approx((4.0, 0.5))
    assert stats["policy/kl"] == pytest.approx(float((ratio - 1 - ratio.log()).mean()), rel=1e-5)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_an_empty_micro_batch_works(name: str) -> None:
    empty = torch.zeros(0, requires_grad=True)
    inputs = LossInputs(new=empty, old=torch.zeros(0), advantages=torch.zeros(0), sequence=ZERO[:0], selected=ZERO[:0].bool())
    result = compute_policy_loss(name, inputs, loss_options(name, dual_clip=3.0))
    assert result.per_token.shape == (0,)
    assert result.stats.result() == {}


def test_errors() -> None:
    with pytest.raises(BatchError, match="advantages"):
        LossInputs(new=torch.zeros(2), old=torch.zeros(2), advantages=torch.zeros(3), sequence=torch.zeros(2, dtype=torch.long))
    inputs = LossInputs(new=torch.zeros(1), old=torch.zeros(1), advantages=torch.zeros(1), sequence=ZERO)
    with pytest.raises(ConfigError, match=r"--policy-loss = 'pp0'.*ppo, cispo, .*gspo, .*reinforce"):
        compute_policy_loss("pp0", inputs, PpoOptions())
    with pytest.raises(ConfigError, match="--dual-clip"):
        PpoOptions(dual_clip=1.0)
