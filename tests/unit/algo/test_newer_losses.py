"""The losses beside PPO, GSPO and CISPO: against verl and TRL where they have them, else written out; and the tokens that they select."""

import importlib
import math
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl needs Python before 3.13")

from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

from agentrl.algo.compute import compute_policy_loss, select_tokens
from agentrl.algo.facts import policy_loss
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.losses.covariance import ClipCovOptions, KlCovOptions, covariance, high_covariance, random_in_covariance_range
from agentrl.algo.losses.gmpo import GmpoOptions
from agentrl.algo.losses.sapo import SapoOptions
from agentrl.algo.selection import high_entropy
from agentrl.algo.token_losses import Denominators, LossInputs, LossOptions, aggregate
from agentrl.core.errors import BatchError, PluginError
from tests.unit.algo.chosen import loss_options
from tests.unit.algo.ragged import Ragged, gradient, ragged
from tests.unit.algo.test_against_trl import grpo, trl_loss

__all__ = ["grpo"]

SEEDS = range(3)
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def total(batch: Ragged, per_token: torch.Tensor, mode: str = "token-mean") -> torch.Tensor:
    sizes = Denominators(tokens=batch.size, episodes=len(batch.lengths), constant=1.0)
    return aggregate(per_token, episode_length=batch.lengths[batch.episode], mode=mode, denominators=sizes)


def drawn(seed: int, spread: float = 0.5) -> tuple[Ragged, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch, log-probabilities before and during an update, and one advantage per sequence."""
    batch = ragged(seed)
    old = -batch.randn(batch.size).abs()
    new = (old + spread * batch.randn(batch.size)).clamp(max=-1e-3)
    return batch, old, new, batch.randn(len(batch.lengths))[batch.episode]


def ours(name: str, batch: Ragged, old: torch.Tensor, advantages: torch.Tensor, options: Any, mode: str, selected: Any = None) -> Any:
    def loss(new: torch.Tensor) -> torch.Tensor:
        inputs = LossInputs(new=new, old=old, advantages=advantages, sequence=batch.episode, selected=selected)
        return total(batch, compute_policy_loss(name, inputs, options).per_token, mode)

    return loss


def verls(name: str, batch: Ragged, old: torch.Tensor, advantages: torch.Tensor, mode: str, **settings: Any) -> Any:
    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **settings)

    def loss(new: torch.Tensor) -> torch.Tensor:
        padded = batch.pad(old), batch.pad(new), batch.pad(advantages)
        return core_algos.get_policy_loss_fn(name)(*padded, batch.mask.float(), mode, config)[0]

    return loss


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "theirs", "mode", "low", "high"),
    [
        ("dppo_tv", "dppo_tv", "token-mean", 0.1, 0.15),
        ("dppo_kl", "dppo_kl", "token-mean", 0.02, 0.05),
        ("sapo", "sapo", "seq-mean-token-mean", 0.2, 0.2),
        ("gmpo", "geo_mean", "seq-mean-token-mean", 0.3, 0.4),
    ],
)
def test_losses_and_gradients_of_verl(seed: int, name: str, theirs: str, mode: str, low: float, high: float) -> None:
    batch, old, new, advantages = drawn(seed)
    options = loss_options(name, eps_clip_low=low, eps_clip_high=high, sapo_tau_positive=1.1, sapo_tau_negative=1.7)
    settings = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": 20.0, "tau_pos": 1.1, "tau_neg": 1.7}
    found = gradient(ours(name, batch, old, advantages, options, mode), new)
    torch.testing.assert_close(found, gradient(verls(theirs, batch, old, advantages, mode, **settings), new), **TOLERANCE)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_caps_the_weight_of_a_token(name: str) -> None:
    batch, old, _, advantages = drawn(0)
    old = old - 8.0
    found = gradient(
        ours(name, batch, old, -advantages.abs(), loss_options(name, eps_clip_low=1.0, eps_clip_high=1.0), "token-mean"), old + 4.0
    )
    settings = {"clip_ratio_low": 1.0, "clip_ratio_high": 1.0, "clip_ratio_c": 20.0}
    torch.testing.assert_close(
        found, gradient(verls(name, batch, old, -advantages.abs(), "token-mean", **settings), old + 4.0), **TOLERANCE
    )
    assert float(found[1].max()) == pytest.approx(20.0 * float(advantages.abs().max()) / batch.size)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("share", [0.05, 0.4])
def test_kl_cov_of_verl(seed: int, share: float) -> None:
    """Selected with the log-probabilities that verl selects with, those of the policy being trained."""
    batch, old, new, advantages = drawn(seed)
    options = KlCovOptions(cov_share=share, kl_cov_coef=0.7)
    selected = high_covariance(LossInputs(new=new, old=new, advantages=advantages, sequence=batch.episode), options)
    assert int(selected.sum()) == max(1, int(share * batch.size))
    config = PolicyLossConfig(kl_cov_ratio=share, ppo_kl_coef=0.7)
    theirs = verls("kl_cov", batch, old, advantages, "token-mean", policy_loss=config)
    torch.testing.assert_close(
        gradient(ours("kl_cov", batch, old, advantages, options, "token-mean", selected), new), gradient(theirs, new), **TOLERANCE
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_cov_of_verl_where_all_candidates_are_chosen(seed: int) -> None:
    """Tokens that clipping stops anyway have no gradient in either; verl keeps their loss, so only gradients are compared."""
    batch, old, new, advantages = drawn(seed)
    options = ClipCovOptions(cov_share=1.0, clip_cov_range=(0.05, 0.8), eps_clip_low=0.2, eps_clip_high=0.28)
    selected = random_in_covariance_range(LossInputs(new=new, old=new, advantages=advantages, sequence=batch.episode), options)
    assert 0 < int(selected.sum()) < batch.size
    config = PolicyLossConfig(clip_cov_ratio=1.0, clip_cov_lb=0.05, clip_cov_ub=0.8)
    theirs = verls("clip_cov", batch, old, advantages, "token-mean", policy_loss=config, clip_ratio_low=0.2, clip_ratio_high=0.28)
    found = gradient(ours("clip_cov", batch, old, advantages, options, "token-mean", selected), new)[1]
    torch.testing.assert_close(found, gradient(theirs, new)[1], **TOLERANCE)


def test_clip_cov_draws_its_share_by_the_seed() -> None:
    batch, old, _, advantages = drawn(1)
    options = ClipCovOptions(cov_share=0.1, clip_cov_range=(-9.0, 9.0))

    def draw(seed: int) -> torch.Tensor:
        inputs = LossInputs(new=old, old=old, advantages=advantages, sequence=batch.episode, seed=seed)
        return random_in_covariance_range(inputs, options)

    drawn_by = [draw(seed) for seed in (3, 3, 4)]
    assert [int(chosen.sum()) for chosen in drawn_by] == [int(0.1 * batch.size)] * 3
    assert torch.equal(drawn_by[0], drawn_by[1])
    assert not torch.equal(drawn_by[0], drawn_by[2])


def test_covariances_add_up_to_that_of_the_batch() -> None:
    batch, old, _, advantages = drawn(2)
    inputs = LossInputs(new=old, old=old, advantages=advantages, sequence=batch.episode)
    expected = torch.cov(torch.stack([old, advantages]).double(), correction=0)[0, 1]
    torch.testing.assert_close(covariance(inputs).mean(), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_sapo_of_trl(grpo: ModuleType, seed: int) -> None:
    batch, old, new, advantages = drawn(seed)
    inputs = {"advantages": batch.pad(advantages), "old_per_token_logps": batch.pad(old)}
    theirs = gradient(lambda x: trl_loss(grpo, batch, x, inputs, loss_type="sapo", sapo_temperature_pos=1.1, sapo_temperature_neg=1.7), new)
    options = SapoOptions(sapo_tau_positive=1.1, sapo_tau_negative=1.7)
    torch.testing.assert_close(gradient(ours("sapo", batch, old, advantages, options, "seq-mean-token-mean"), new), theirs, **TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
def test_gmpo_of_trl(grpo: ModuleType, seed: int) -> None:
    trainer = importlib.import_module("trl.experimental.gmpo.gmpo_trainer").GMPOTrainer
    batch, old, new, advantages = drawn(seed)
    stand_in = SimpleNamespace(GRPOTrainer=trainer)
    inputs = {"advantages": advantages[batch.last], "old_per_token_logps": batch.pad(old)}
    trainer.get_off_policy_mask = grpo.GRPOTrainer.get_off_policy_mask
    theirs = gradient(lambda x: trl_loss(stand_in, batch, x, inputs, epsilon_low=0.3, epsilon_high=0.4), new)  # type: ignore[arg-type]
    options = GmpoOptions(eps_clip_low=0.3, eps_clip_high=0.4)
    torch.testing.assert_close(gradient(ours("gmpo", batch, old, advantages, options, "seq-mean-token-mean"), new), theirs, **TOLERANCE)


@pytest.mark.parametrize("share", [0.2, 0.37, 1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_tokens_of_high_entropy_are_those_of_trl(grpo: ModuleType, seed: int, share: float) -> None:
    batch = ragged(seed)
    entropies = batch.randn(batch.size).abs().round(decimals=1)  # some are equal
    trainer = SimpleNamespace(accelerator=SimpleNamespace(pad_across_processes=lambda x, dim, pad_index: x, gather=lambda x: x))
    theirs = grpo.GRPOTrainer.get_high_entropy_mask(trainer, batch.pad(entropies), batch.mask.long(), 1 - share)
    assert torch.equal(high_entropy(entropies, share), batch.flat(theirs))


def test_ipo_written_out() -> None:
    """Masked by the difference of probabilities on both sides, whatever the advantage; the squared log ratio counts for every token."""
    old = torch.tensor([0.5, 0.5, 0.5, 0.2]).log()
    new = torch.tensor([0.9, 0.1, 0.6, 0.1]).log()
    advantages = torch.tensor([-1.0, 1.0, 2.0, -3.0])
    inputs = LossInputs(new=new, old=old, advantages=advantages, sequence=torch.arange(4))
    found = compute_policy_loss("ipo", inputs, loss_options("ipo", eps_clip_low=0.3, eps_clip_high=0.3))
    torch.testing.assert_close(found.per_token, torch.tensor([0.0, 0.0, -1.2 * 2.0, 0.5 * 3.0]))
    assert found.stats.result()["policy/clip_fraction"] == 0.5
    distant = compute_policy_loss("ipo", inputs, loss_options("ipo", eps_clip_low=0.3, eps_clip_high=0.3, ipo_kl_coef=0.1))
    squares = torch.tensor([math.log(1.8), math.log(0.2), math.log(1.2), math.log(0.5)]).square()
    torch.testing.assert_close(distant.per_token, found.per_token + 0.1 * squares)


def test_gmpo_clips_each_token_on_one_side() -> None:
    new = torch.tensor([1.0, -1.0], requires_grad=True)
    inputs = LossInputs(new=new, old=torch.zeros(2), advantages=torch.ones(2), sequence=torch.zeros(2, dtype=torch.long))
    loss = compute_policy_loss("gmpo", inputs, loss_options("gmpo", eps_clip_low=0.4, eps_clip_high=0.4)).per_token.mean()
    assert float(loss.detach()) == pytest.approx(-math.exp((0.4 - 1.0) / 2))
    (slope,) = torch.autograd.grad(loss, new)
    assert slope.tolist() == pytest.approx([0.0, -math.exp(-0.3) / 2])


def test_a_loss_that_selects_needs_its_selection() -> None:
    inputs = LossInputs(new=torch.zeros(2), old=torch.zeros(2), advantages=torch.ones(2), sequence=torch.arange(2))
    with pytest.raises(BatchError, match="select_tokens"):
        compute_policy_loss("kl_cov", inputs, loss_options("kl_cov"))
    assert select_tokens(POLICY_LOSSES["ppo"], inputs, LossOptions()) is None


def test_a_selection_of_ones_own_is_checked() -> None:
    inputs = LossInputs(new=torch.zeros(2), old=torch.zeros(2), advantages=torch.tensor([1.0, -1.0]), sequence=torch.arange(2))

    def above(inputs: LossInputs, options: LossOptions) -> torch.Tensor:
        return inputs.advantages > 0

    def halves(inputs: LossInputs, options: LossOptions) -> torch.Tensor:
        return inputs.advantages / 2

    @policy_loss(selects=above)
    def fine(inputs: LossInputs, options: LossOptions) -> torch.Tensor:
        return -inputs.new

    @policy_loss(selects=halves)
    def broken(inputs: LossInputs, options: LossOptions) -> torch.Tensor:
        return -inputs.new

    selected = select_tokens(fine, inputs, LossOptions())
    assert selected is not None
    assert selected.tolist() == [True, False]
    with pytest.raises(PluginError, match=r"halves.*truth value"):
        select_tokens(broken, inputs, LossOptions())
