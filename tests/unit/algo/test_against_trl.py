"""Losses, aggregations, KL in the loss and masks against TRL's GRPO trainer, to 1e-5 in float32.

TRL computes them in one method of its trainer; it runs here on a stand-in that only holds settings and hands out the
log-probabilities, so that the arithmetic is TRL's own.
"""

import importlib
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.algo.compute import compute_correction, compute_policy_loss
from agentrl.algo.corrections.ratios import opsm_keep
from agentrl.algo.kl import approximate_kl
from agentrl.algo.losses.ppo import PpoOptions
from agentrl.algo.token_losses import Denominators, LossInputs, aggregate
from tests.unit.algo.chosen import correction_inputs, correction_options, loss_options
from tests.unit.algo.ragged import Ragged, gradient, ragged

SEEDS = range(5)
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
LENGTH = 23
BETA = 0.3


@pytest.fixture(scope="module")
def grpo() -> ModuleType:
    """TRL's trainer, kept from importing vLLM, which takes longer than all of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("trl.import_utils"), "is_vllm_available", lambda *_, **__: False)
        return importlib.import_module("trl.trainer.grpo_trainer")


def trl_loss(grpo: ModuleType, batch: Ragged, new: torch.Tensor, inputs: dict[str, torch.Tensor], **settings: Any) -> torch.Tensor:
    mask = batch.mask.long()
    trainer = SimpleNamespace(
        **{
            "loss_type": "grpo",
            "importance_sampling_level": "token",
            "epsilon_low": 0.2,
            "epsilon_high": 0.28,
            "beta": 0.0,
            "off_policy_mask_threshold": None,
            "use_vllm": False,
            **settings,
        },
        args=SimpleNamespace(**{"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1, **settings}),
        top_entropy_quantile=1.0,
        vllm_importance_sampling_correction=True,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        max_completion_length=LENGTH,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics={"eval": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.pad(new), torch.zeros(mask.shape), None),
        get_off_policy_mask=grpo.GRPOTrainer.get_off_policy_mask,
    )
    prompts = torch.zeros(len(mask), 1, dtype=torch.long)
    everything = {"prompt_ids": prompts, "prompt_mask": prompts, "completion_ids": mask, "completion_mask": mask}
    return grpo.GRPOTrainer._compute_loss(trainer, None, {**everything, "num_items_in_batch": mask.sum(), **inputs})


def total(batch: Ragged, per_token: torch.Tensor, mode: str) -> torch.Tensor:
    sizes = Denominators(tokens=batch.size, episodes=len(batch.lengths), constant=LENGTH)
    return aggregate(per_token, episode_length=batch.lengths[batch.episode], mode=mode, denominators=sizes)


@pytest.fixture(params=SEEDS)
def batch(request: pytest.FixtureRequest) -> Ragged:
    return ragged(request.param)


@pytest.mark.parametrize("dual_clip", [None, 2.0])
@pytest.mark.parametrize(
    ("mode", "loss_type"),
    [
        ("seq-mean-token-mean", "grpo"),
        ("token-mean", "bnpo"),
        ("token-mean", "dapo"),
        ("constant", "dr_grpo"),
        ("seq-mean-token-sum", "luspo"),
    ],
)
def test_clipped_loss_in_every_aggregation(grpo: ModuleType, batch: Ragged, mode: str, loss_type: str, dual_clip: float | None) -> None:
    old, advantages = -batch.randn(batch.size).abs(), batch.randn(batch.size)
    start = old + 0.5 * batch.randn(batch.size)
    options = PpoOptions(eps_clip_low=0.2, eps_clip_high=0.28, dual_clip=dual_clip)
    inputs = {"advantages": batch.pad(advantages), "old_per_token_logps": batch.pad(old)}

    def ours(new: torch.Tensor) -> torch.Tensor:
        loss = compute_policy_loss("ppo", LossInputs(new=new, old=old, advantages=advantages, sequence=batch.episode), options)
        return total(batch, loss.per_token, mode)

    theirs = gradient(lambda new: trl_loss(grpo, batch, new, inputs, loss_type=loss_type, delta=dual_clip), start)
    torch.testing.assert_close(gradient(ours, start), theirs, **TOLERANCE)


def test_truncated_episodes_leave_loss_and_denominator(grpo: ModuleType, batch: Ragged) -> None:
    """TRL's ``mask_truncated_completions`` sets the mask of such episodes to 0 before tokens are counted."""
    old, advantages = -batch.randn(batch.size).abs(), batch.randn(batch.size)
    start, whole = old + 0.5 * batch.randn(batch.size), torch.arange(len(batch.lengths)) % 3 > 0
    mask = batch.mask.long() * whole[:, None]
    inputs = {"advantages": batch.pad(advantages), "old_per_token_logps": batch.pad(old), "completion_mask": mask}
    kept = whole[batch.episode]

    def ours(new: torch.Tensor) -> torch.Tensor:
        loss_inputs = LossInputs(new=new[kept], old=old[kept], advantages=advantages[kept], sequence=batch.episode[kept])
        loss = compute_policy_loss("ppo", loss_inputs, loss_options("ppo", eps_clip_low=0.2, eps_clip_high=0.28))
        sizes = Denominators(tokens=int(kept.sum()), episodes=int(whole.sum()), constant=LENGTH)
        return aggregate(loss.per_token, episode_length=batch.lengths[batch.episode[kept]], mode="token-mean", denominators=sizes)

    theirs = gradient(lambda new: trl_loss(grpo, batch, new, inputs | {"num_items_in_batch": mask.sum()}, loss_type="dapo"), start)
    torch.testing.assert_close(gradient(ours, start), theirs, **TOLERANCE)


def test_gspo(grpo: ModuleType, batch: Ragged) -> None:
    """TRL differentiates the sequence's ratio itself: the same gradient where a sequence has one advantage."""
    old, advantages = -batch.randn(batch.size).abs(), batch.randn(len(batch.lengths))
    start = old + 0.5 * batch.randn(batch.size)
    inputs = {"advantages": advantages, "old_per_token_logps": batch.pad(old)}

    def ours(new: torch.Tensor) -> torch.Tensor:
        loss_inputs = LossInputs(new=new, old=old, advantages=advantages[batch.episode], sequence=batch.episode)
        loss = compute_policy_loss("gspo", loss_inputs, loss_options("gspo", eps_clip_low=0.2, eps_clip_high=0.28))
        return total(batch, loss.per_token, "seq-mean-token-mean")

    theirs = gradient(lambda new: trl_loss(grpo, batch, new, inputs, importance_sampling_level="sequence"), start)
    torch.testing.assert_close(gradient(ours, start), theirs, **TOLERANCE)


def test_cispo(grpo: ModuleType, batch: Ragged) -> None:
    """TRL's ``epsilon_high`` is the bound itself, and there is no lower one."""
    old, advantages = -batch.randn(batch.size).abs(), batch.randn(batch.size)
    start = old + 0.5 * batch.randn(batch.size)
    inputs = {"advantages": batch.pad(advantages), "old_per_token_logps": batch.pad(old)}

    def ours(new: torch.Tensor) -> torch.Tensor:
        loss_inputs = LossInputs(new=new, old=old, advantages=advantages, sequence=batch.episode)
        return total(
            batch,
            compute_policy_loss("cispo", loss_inputs, loss_options("cispo", eps_clip_low=1.0, eps_clip_high=0.5)).per_token,
            "token-mean",
        )

    theirs = gradient(lambda new: trl_loss(grpo, batch, new, inputs, loss_type="cispo", epsilon_high=1.5), start)
    torch.testing.assert_close(gradient(ours, start), theirs, **TOLERANCE)


def test_kl_in_the_loss(grpo: ModuleType, batch: Ragged) -> None:
    old, advantages = -batch.randn(batch.size).abs(), batch.randn(batch.size)
    start, reference = old + 0.3 * batch.randn(batch.size), old + 0.3 * batch.randn(batch.size)
    inputs = {"advantages": batch.pad(advantages), "old_per_token_logps": batch.pad(old), "ref_per_token_logps": batch.pad(reference)}

    def ours(new: torch.Tensor) -> torch.Tensor:
        loss_inputs = LossInputs(new=new, old=old, advantages=advantages, sequence=batch.episode)
        loss = compute_policy_loss("ppo", loss_inputs, loss_options("ppo", eps_clip_low=0.2, eps_clip_high=0.28))
        return total(batch, loss.per_token + BETA * approximate_kl(new, reference, "k3"), "token-mean")

    theirs = gradient(lambda new: trl_loss(grpo, batch, new, inputs, loss_type="bnpo", beta=BETA), start)
    torch.testing.assert_close(gradient(ours, start), theirs, **TOLERANCE)


@pytest.mark.parametrize("preset", ["tis", "icepop", "decoupled"])
def test_corrected_loss(grpo: ModuleType, batch: Ragged, preset: str) -> None:
    """Masked tokens stay in the denominator."""
    old, advantages = -batch.randn(batch.size).abs(), batch.randn(batch.size)
    start, behaviour = old + 0.3 * batch.randn(batch.size), old + batch.randn(batch.size)
    fresh = torch.ones(batch.size, dtype=torch.bool)
    correction_of = correction_inputs(old, behaviour, batch.episode, fresh, advantages)
    correction = compute_correction(preset, correction_of, correction_options(preset))
    ratio = (batch.pad(old) - batch.pad(behaviour)).exp()
    ratio = {
        "tis": ratio.clamp(max=2.0),
        "icepop": ratio.masked_fill((ratio < 0.5) | (ratio > 5.0), 0.0),
        "decoupled": ratio.clamp(max=10.0),
    }[preset]
    inputs = {"advantages": batch.pad(advantages), "old_per_token_logps": batch.pad(old), "importance_sampling_ratio": ratio}

    def ours(new: torch.Tensor) -> torch.Tensor:
        loss_inputs = LossInputs(new=new, old=old, advantages=advantages, sequence=batch.episode)
        loss = compute_policy_loss("ppo", loss_inputs, loss_options("ppo", eps_clip_low=0.2, eps_clip_high=0.28))
        return total(batch, loss.per_token * correction.weights, "token-mean")

    theirs = gradient(lambda new: trl_loss(grpo, batch, new, inputs, loss_type="bnpo", use_vllm=True), start)
    torch.testing.assert_close(gradient(ours, start), theirs, **TOLERANCE)


def test_opsm(grpo: ModuleType, batch: Ragged) -> None:
    behaviour, advantages = -batch.randn(batch.size).abs(), batch.randn(len(batch.lengths))
    new = behaviour + 0.3 * batch.randn(batch.size)
    fresh = torch.ones(batch.size, dtype=torch.bool)
    ours = opsm_keep(correction_inputs(new, behaviour, batch.episode, fresh, advantages[batch.episode]), 0.05)
    theirs = grpo.GRPOTrainer.get_off_policy_mask(advantages[:, None], batch.pad(new), batch.pad(behaviour), batch.mask.float(), 0.05)
    assert torch.equal(ours, theirs[:, 0].bool()[batch.episode])
