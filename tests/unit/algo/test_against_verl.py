"""Every formula against verl's, on random ragged batches with environment tokens in between, to 1e-5 in float32."""

import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("verl", reason="verl needs Python before 3.13")

from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils import torch_functional
from verl.workers.config import ActorConfig

from agentrl.algo.advantages import AdvantageInputs
from agentrl.algo.compute import compute_advantages, compute_correction, compute_policy_loss
from agentrl.algo.corrections.ratios import RatioOptions
from agentrl.algo.estimators.gae import GaeOptions
from agentrl.algo.kl import KLController, approximate_kl
from agentrl.algo.losses.ppo import PpoOptions
from agentrl.algo.statistics import segment_sum
from agentrl.algo.token_losses import Denominators, LossInputs, aggregate, value_loss
from agentrl.learner.head import token_scores
from tests.unit.algo.chosen import correction_inputs, correction_options, estimator_options, loss_options
from tests.unit.algo.ragged import Ragged, gradient, outcome_inputs, ragged

SEEDS = range(5)
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
CONSTANT = 17.0
MODES = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "constant": "seq-mean-token-sum-norm",
}


def bessel(batch: Ragged) -> float:
    """verl whitens by the unbiased standard deviation, agentrl by the biased one."""
    return math.sqrt((batch.size - 1) / batch.size)


def whole(batch: Ragged) -> Denominators:
    return Denominators(tokens=batch.size, episodes=len(batch.lengths), constant=CONSTANT)


def total(batch: Ragged, per_token: torch.Tensor, mode: str) -> torch.Tensor:
    return aggregate(per_token, episode_length=batch.lengths[batch.episode], mode=mode, denominators=whole(batch))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9)])
def test_gae(seed: int, gamma: float, lam: float) -> None:
    batch = ragged(seed)
    token_rewards, values = batch.randn(batch.size), batch.randn(batch.size)
    inputs = AdvantageInputs(
        token_rewards=token_rewards,
        episode=batch.episode,
        group=batch.group,
        rewards=segment_sum(token_rewards, batch.episode, len(batch.lengths)),
        values=values,
    )
    options = GaeOptions(gamma=gamma, gae_lambda=lam, reward_clip_range=(-1e9, 1e9))
    ours = compute_advantages("gae", inputs, options)
    theirs, returns = core_algos.compute_gae_advantage_return(
        batch.pad(token_rewards), batch.pad(values, 3.0), batch.mask.float(), gamma, lam
    )
    assert ours.returns is not None
    torch.testing.assert_close(ours.returns, batch.flat(returns), **TOLERANCE)
    torch.testing.assert_close(ours.advantages * bessel(batch), batch.flat(theirs), **TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce(seed: int, gamma: float) -> None:
    batch = ragged(seed)
    token_rewards, kl = batch.randn(batch.size), 0.1 * batch.randn(batch.size)
    rewards = segment_sum(token_rewards, batch.episode, len(batch.lengths))
    inputs = AdvantageInputs(token_rewards=token_rewards, episode=batch.episode, group=batch.group, rewards=rewards, kl=kl)
    ours = compute_advantages("reinforce", inputs, estimator_options("reinforce", gamma=gamma, reward_clip_range=(-1e9, 1e9)))
    theirs, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        batch.pad(token_rewards - kl), batch.mask.float(), SimpleNamespace(gamma=gamma)
    )
    torch.testing.assert_close(ours.advantages * bessel(batch), batch.flat(theirs), **TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_baseline(seed: int) -> None:
    batch = ragged(seed)
    rewards = batch.randn(len(batch.lengths))
    ours = compute_advantages("reinforce_baseline", outcome_inputs(batch, rewards), estimator_options("reinforce_baseline"))
    theirs, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        batch.pad(batch.at_end(rewards)), batch.mask.float(), batch.index
    )
    torch.testing.assert_close(ours.advantages * bessel(batch), batch.flat(theirs), **TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("theirs", ["compute_rloo_outcome_advantage", "compute_rloo_vectorized_outcome_advantage"])
def test_rloo(seed: int, theirs: str) -> None:
    batch = ragged(seed)
    rewards = batch.randn(len(batch.lengths))
    ours = compute_advantages("rloo", outcome_inputs(batch, rewards), estimator_options("rloo"))
    expected, _ = getattr(core_algos, theirs)(batch.pad(batch.at_end(rewards)), batch.mask.float(), batch.index)
    torch.testing.assert_close(ours.advantages, batch.flat(expected).float(), **TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "divide"), [("group_norm", True), ("grpo", True), ("dr_grpo", False)])
def test_group_norm_and_dr_grpo(seed: int, name: str, divide: bool) -> None:
    batch = ragged(seed)
    rewards = batch.randn(len(batch.lengths))
    ours = compute_advantages(name, outcome_inputs(batch, rewards), estimator_options(name))
    theirs, _ = core_algos.compute_grpo_outcome_advantage(
        batch.pad(batch.at_end(rewards)), batch.mask.float(), batch.index, epsilon=1e-9, norm_adv_by_std_in_grpo=divide
    )
    torch.testing.assert_close(ours.advantages, batch.flat(theirs), **TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["ppo", "dual-clip", "gspo", "cispo"])
def test_policy_losses_and_their_gradients(seed: int, mode: str, name: str) -> None:
    batch = ragged(seed)
    old, advantages = -batch.randn(batch.size).abs(), batch.randn(batch.size)
    start = old + 0.5 * batch.randn(batch.size)
    options = PpoOptions(eps_clip_low=0.2, eps_clip_high=0.28, dual_clip=2.0 if name == "dual-clip" else None)
    theirs = {"ppo": "vanilla", "dual-clip": "vanilla"}.get(name, name)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=2.0 if name == "dual-clip" else 1e9,
        global_batch_info={"loss_scale_factor": CONSTANT},
    )

    def ours_of(new: torch.Tensor) -> torch.Tensor:
        inputs = LossInputs(new=new, old=old, advantages=advantages, sequence=batch.episode)
        return total(batch, compute_policy_loss("ppo" if name == "dual-clip" else name, inputs, options).per_token, mode)

    def theirs_of(new: torch.Tensor) -> torch.Tensor:
        function = core_algos.get_policy_loss_fn(theirs)
        loss, _ = function(batch.pad(old), batch.pad(new), batch.pad(advantages, 3.0), batch.mask.float(), MODES[mode], config)
        return loss

    torch.testing.assert_close(gradient(ours_of, start), gradient(theirs_of, start), **TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_reinforce_loss_is_verls_policy_gradient(seed: int, mode: str) -> None:
    batch = ragged(seed)
    old, advantages = -batch.randn(batch.size).abs(), batch.randn(batch.size)

    def ours_of(new: torch.Tensor) -> torch.Tensor:
        inputs = LossInputs(new=new, old=old, advantages=advantages, sequence=batch.episode)
        return total(batch, compute_policy_loss("reinforce", inputs, loss_options("reinforce")).per_token, mode)

    def theirs_of(new: torch.Tensor) -> torch.Tensor:
        config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, global_batch_info={"loss_scale_factor": CONSTANT})
        function = core_algos.get_policy_loss_fn("gpg")
        loss, _ = function(batch.pad(old), batch.pad(new), batch.pad(advantages, 3.0), batch.mask.float(), MODES[mode], config)
        return loss

    torch.testing.assert_close(gradient(ours_of, old), gradient(theirs_of, old), **TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl(seed: int, estimator: str) -> None:
    batch = ragged(seed)
    reference = batch.randn(batch.size)
    start = reference + batch.randn(batch.size).clamp(min=-2.6)  # below, verl's k3 is clamped and has no gradient
    ours = gradient(lambda new: approximate_kl(new, reference, estimator).sum(), start)
    theirs = gradient(lambda new: core_algos.kl_penalty(new, reference, estimator).sum(), start)
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize(("estimator", "within"), [("k1", (-100.0, 100.0)), ("k2", (-4.47, 4.47)), ("k3", (-2.61, 100.0))])
def test_kl_of_policies_far_apart_up_to_where_verl_clamps_it(estimator: str, within: tuple[float, float]) -> None:
    far, none = torch.linspace(*within, 500), torch.zeros(500)
    ours, theirs = approximate_kl(far, none, estimator), core_algos.kl_penalty(far, none, estimator)
    torch.testing.assert_close(ours.clamp(max=10.0) if estimator == "k3" else ours, theirs, **TOLERANCE)


def test_adaptive_kl_controller() -> None:
    ours, theirs = KLController(coefficient=0.1, target=2.0, horizon=1000.0), core_algos.AdaptiveKLController(0.1, 2.0, 1000.0)
    for kl in (0.1, 1.9, 2.1, 50.0, 3.0):
        ours = ours.update(kl, episodes=128)
        theirs.update(kl, 128)
        assert ours.coefficient == pytest.approx(float(theirs.value), rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_value_loss(seed: int, mode: str) -> None:
    batch = ragged(seed)
    old, returns = batch.randn(batch.size), batch.randn(batch.size)
    start = old + batch.randn(batch.size)
    ours = gradient(lambda new: total(batch, value_loss(new, old, returns, 0.2).per_token, mode), start)
    theirs = gradient(
        lambda new: core_algos.compute_value_loss(
            batch.pad(new), batch.pad(returns), batch.pad(old), batch.mask.float(), 0.2, MODES[mode], loss_scale_factor=CONSTANT
        )[0],
        start,
    )
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_entropy(temperature: float) -> None:
    logits = 5 * torch.randn(40, 33, generator=torch.Generator().manual_seed(0))
    targets, tempered = torch.zeros(40, dtype=torch.long), torch.full((40,), temperature)
    ours = gradient(lambda x: token_scores(x, targets, tempered, True)[1].sum(), logits)
    theirs = gradient(lambda x: torch_functional.entropy_from_logits(x / temperature).sum(), logits)
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "level", "threshold"),
    [
        ("tis", "token", 2.0),
        ("icepop", "token", "0.5_5"),
        ("seq-tis", "sequence", 2.0),
    ],
    ids=["tis", "icepop", "sequence"],
)
def test_correction_weights_and_diagnostics(seed: int, name: str, level: str, threshold: float | str) -> None:
    batch = ragged(seed)
    old = -batch.randn(batch.size).abs()
    behaviour = old + batch.randn(batch.size)
    fresh = torch.ones(batch.size, dtype=torch.bool)
    inputs = correction_inputs(old, behaviour, batch.episode, fresh, batch.randn(batch.size))
    ours = compute_correction(name, inputs, correction_options(name))
    weights, metrics = rollout_corr_helper.compute_rollout_correction_weights(
        batch.pad(old - behaviour), batch.mask.float(), rollout_is=level, rollout_is_threshold=threshold
    )
    torch.testing.assert_close(ours.weights, batch.flat(weights), **TOLERANCE)
    divergence = rollout_corr_helper.compute_offpolicy_metrics(batch.pad(old), batch.pad(behaviour), batch.mask.float())
    result = ours.stats.result()
    assert result["ess/weights"] == pytest.approx(metrics["rollout_is_eff_sample_size"], rel=1e-5)
    assert result["mismatch/kl"] == pytest.approx(divergence["k3_kl"], rel=1e-4)
    if threshold == "0.5_5":
        assert result["off_policy/masked"] == pytest.approx(metrics["rollout_is_oob_ratio"], rel=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("level", "theirs"), [("seq", "seq_sum_k1"), ("geo", "seq_mean_k1"), ("token", "token_k1")])
def test_masks(seed: int, level: str, theirs: str) -> None:
    """verl bounds the inverse ratio, so its band is the inverse of ours."""
    batch = ragged(seed)
    log_rho = (0.3 if level == "token" else 0.15) * batch.randn(batch.size)
    options = RatioOptions(off_policy_level=level, off_policy_mode="mask", off_policy_range=(0.9, 1.2))  # type: ignore[arg-type]
    fresh = torch.ones(batch.size, dtype=torch.bool)
    inputs = correction_inputs(log_rho, torch.zeros(batch.size), batch.episode, fresh, batch.randn(batch.size))
    ours = compute_correction("tis", inputs, options)
    mask, _ = rollout_corr_helper.compute_rollout_rejection_mask(batch.pad(log_rho), batch.mask.float(), theirs, f"{1 / 1.2}_{1 / 0.9}")
    assert 0 < int(ours.keep.sum()) < batch.size
    assert torch.equal(ours.keep, batch.flat(mask).bool())
