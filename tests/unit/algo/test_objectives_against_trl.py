"""Losses of pairs and of labelled answers against TRL's trainers, to 1e-6 in float32, and their gradients.

TRL computes them in one method of a trainer; it runs here on a stand-in that holds settings and hands out log-probabilities.
"""

from __future__ import annotations

import typing
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algo.objectives import OBJECTIVES
from agentrl.algo.objectives.dpo import PAIR_LOSSES, DpoLoss, DpoOptions, matches
from agentrl.algo.objectives.kto import KtoOptions
from agentrl.algo.row_losses import RowScores, StepRows

PAIRS, LENGTH, BETA = 5, 7, 0.3
SMOOTHING = {"robust": 0.2, "exo_pair": 0.1, "aot": 0.2, "aot_unpaired": 0.2}


def test_every_loss_of_the_settings_is_there():
    assert set(PAIR_LOSSES) == {name for part in typing.get_args(DpoLoss) for name in (typing.get_args(part) or (part,))}


def scored(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities per token of both answers of some pairs, by the policy and by the reference, and their mask. # [2 B, L]."""
    generator = torch.Generator().manual_seed(seed)
    policy, reference = (-torch.rand(2 * PAIRS, LENGTH, generator=generator) * 3 for _ in range(2))
    lengths = torch.randint(1, LENGTH + 1, (2 * PAIRS,), generator=generator)
    mask = torch.arange(LENGTH) < lengths[:, None]
    return (policy * mask).requires_grad_(), reference * mask, mask


def outputs(logprobs: Tensor) -> SimpleNamespace:
    nothing = torch.zeros_like(logprobs)
    return SimpleNamespace(log_probs=logprobs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())


def stand_in(reference: Tensor, **settings: Any) -> SimpleNamespace:
    gather = lambda value: value  # noqa: E731
    return SimpleNamespace(
        model=SimpleNamespace(training=False),
        ref_model=lambda **_: outputs(reference),
        accelerator=SimpleNamespace(device=torch.device("cpu"), gather=gather, gather_for_metrics=gather),
        args=SimpleNamespace(discopop_tau=0.05, gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        beta=BETA,
        _total_train_tokens=0,
        _metrics={"eval": defaultdict(list)},
        **settings,
    )


@pytest.fixture(autouse=True)
def no_checkpointing(monkeypatch: pytest.MonkeyPatch):
    for module in ("trl.trainer.dpo_trainer", "trl.trainer.kto_trainer"):
        monkeypatch.setattr(f"{module}.disable_gradient_checkpointing", lambda *_: nullcontext())
        monkeypatch.setattr(f"{module}.is_peft_model", lambda _: False)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss", sorted(set(PAIR_LOSSES) - {"cdpo", "ipo_sum"}))
def test_a_loss_of_pairs_is_that_of_trl(loss: str, seed: int):
    from trl import DPOTrainer

    policy, reference, mask = scored(seed)
    smoothing = SMOOTHING.get(loss, 0.0)
    rest: dict[str, Any] = {"loss_types": [loss], "loss_weights": [1.0], "label_smoothing": smoothing, "f_divergence_type": "reverse_kl"}
    trainer = stand_in(reference, ld_alpha=None, use_weighting=False, **rest)
    completion = torch.cat([torch.zeros(2 * PAIRS, 1, dtype=torch.long), mask.long()], dim=1)  # one token of a prompt
    batch = {"input_ids": torch.ones_like(completion), "attention_mask": torch.ones_like(completion), "completion_mask": completion}
    theirs = DPOTrainer._compute_loss(trainer, lambda **_: outputs(policy), batch, False)
    options = DpoOptions(loss=loss, beta=BETA, label_smoothing=smoothing)
    scores = scores_of(policy, reference, mask, torch.arange(2 * PAIRS).view(2, PAIRS).T.flatten())
    step = StepRows(lengths=scores.lengths(), sums=scores.sums().detach(), reference=scores.reference)
    found = OBJECTIVES["dpo"](replace(scores, columns=dict(matches(step, options))), options)
    assert len(found.losses) == PAIRS
    assert_same(found.losses.mean(), theirs, policy, mask)


@pytest.mark.parametrize("seed", range(5))
def test_the_loss_of_labelled_answers_is_that_of_trl(seed: int):
    from trl import KTOTrainer

    policy, reference, mask = scored(seed)
    desirable = torch.rand(2 * PAIRS, generator=torch.Generator().manual_seed(seed)) > 0.5
    divergences = iter([torch.full((2 * PAIRS,), 0.7 * (seed - 1)), torch.zeros(2 * PAIRS)])
    weights: dict[str, float] = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    trainer = stand_in(reference, calculate_KL=True, loss_type="kto", _compute_kl_logps=lambda *_: next(divergences), **weights)
    completion = torch.cat([torch.zeros(2 * PAIRS, 1, dtype=torch.long), mask.long()], dim=1)
    batch = {"input_ids": torch.ones_like(completion), "attention_mask": torch.ones_like(completion), "completion_mask": completion}
    theirs = KTOTrainer._compute_loss(trainer, lambda **_: outputs(policy), {**batch, "label": desirable}, False)
    z = torch.full((2 * PAIRS,), max(0.0, 0.7 * (seed - 1)))
    scores = scores_of(policy, reference, mask, torch.arange(2 * PAIRS))
    given = replace(scores, columns={"desirable": desirable, "divergence": z})
    assert_same(OBJECTIVES["kto"](given, KtoOptions(beta=BETA, **weights)).losses.mean(), theirs, policy, mask)


@pytest.mark.parametrize("loss", ["aot", "aot_unpaired"])
def test_the_gradient_of_a_loss_that_sorts_does_not_depend_on_micro_batches(loss: str):
    """Pairs of the same rank may be in other micro-batches: what a row is compared with comes from the first pass."""
    options = DpoOptions(loss=loss, beta=BETA, label_smoothing=0.1)
    policy, reference, mask = scored(7)
    whole = scores_of(policy, reference, mask, torch.arange(2 * PAIRS))
    step = StepRows(lengths=whole.lengths(), sums=whole.sums().detach(), reference=whole.reference)
    columns = dict(matches(step, options))
    together = OBJECTIVES["dpo"](replace(whole, columns=columns), options).losses.sum()
    (expected,) = torch.autograd.grad(together, policy)
    parts = []
    for first, last in ((0, 2), (2, 6), (6, 10)):
        rows = torch.arange(first, last)
        part = scores_of(policy, reference, mask, rows)
        parts.append(
            OBJECTIVES["dpo"](replace(part, columns={name: values[rows] for name, values in columns.items()}), options).losses.sum()
        )
    assert torch.stack(parts).sum().item() == pytest.approx(together.item(), rel=1e-6)
    (found,) = torch.autograd.grad(torch.stack(parts).sum(), policy)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def scores_of(policy: Tensor, reference: Tensor, mask: Tensor, rows: Tensor) -> RowScores:
    """Scores of some rows, in this order, of tensors with a row each. # [2 B, L]."""
    row, place = mask[rows].nonzero().T
    return RowScores(num_rows=len(rows), row=row, outputs=policy[rows][row, place], reference=reference[rows].sum(1))


def assert_same(ours: Tensor, theirs: Tensor, policy: Tensor, mask: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    gradients = (torch.autograd.grad(loss, policy)[0] * mask for loss in (ours, theirs))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
