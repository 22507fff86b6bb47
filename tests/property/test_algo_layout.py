"""The loss and its gradient do not depend on how a batch is ordered, cut into micro-batches or spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.algo.compute import compute_correction, compute_policy_loss, select_tokens
from agentrl.algo.corrections import CORRECTIONS
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.token_losses import AGGREGATIONS, Denominators, LossInputs, aggregate
from agentrl.core.metrics import MetricSums
from tests.unit.algo.chosen import correction_inputs, correction_options, loss_options

CLASSES, FEATURES = 5, 4
OPTIONS = {
    "eps_clip_low": 0.1,
    "eps_clip_high": 0.15,
    "dual_clip": 1.5,
    "cov_share": 0.3,
    "clip_cov_range": (-0.3, 1.0),
    "ipo_kl_coef": 0.1,
}
NEWER = sorted(set(POLICY_LOSSES) - {"ppo", "gspo", "cispo", "reinforce"})


@dataclass(frozen=True)
class Batch:
    """Rows of action tokens of a linear toy policy; several rows may be branches of one episode."""

    features: Tensor  # [A, FEATURES]
    actions: Tensor  # [A]
    old: Tensor  # [A]
    behaviour: Tensor  # [A]
    advantages: Tensor  # [A]
    row: Tensor  # [A]
    episode_of_row: Tensor  # [R]

    def take(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Positions of the tokens of `rows`, row after row, and the rows' numbers from 0 on."""
        positions = [torch.nonzero(self.row == row).flatten() for row in rows]
        index = [torch.full((len(p),), i) for i, p in enumerate(positions)]
        none = torch.zeros(0, dtype=torch.long)
        return torch.cat([none, *positions]), torch.cat([none, *index])

    @property
    def episode_length(self) -> Tensor:
        episode = self.episode_of_row[self.row]
        return torch.bincount(episode)[episode]


def make(seed: int, rows: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (rows,), generator=g)
    size = int(lengths.sum())
    row = torch.repeat_interleave(torch.arange(rows), lengths)
    actions = torch.randint(0, CLASSES, (size,), generator=g)
    old = torch.randn(size, CLASSES, generator=g, dtype=torch.float64).log_softmax(-1)[torch.arange(size), actions]
    return Batch(
        features=torch.randn(size, FEATURES, generator=g, dtype=torch.float64),
        actions=actions,
        old=old,
        behaviour=old + 0.4 * torch.randn(size, generator=g, dtype=torch.float64),
        advantages=torch.randn(size, generator=g, dtype=torch.float64),
        row=row,
        episode_of_row=torch.arange(rows) // 2,
    )


def weights() -> Tensor:
    return torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def loss_and_gradient(
    batch: Batch, micro_batches: list[list[int]], name: str, mode: str, preset: str = "tis"
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Sum over micro-batches, as if each had been on a rank of its own."""
    theta = weights().requires_grad_(True)
    sizes = Denominators(tokens=len(batch.row), episodes=len(batch.episode_of_row.unique()), constant=11.0)
    stats, parts = MetricSums(), []
    whole = LossInputs(new=batch.old, old=batch.old, advantages=batch.advantages, sequence=batch.row)
    options = loss_options(name, **OPTIONS)
    selected = select_tokens(POLICY_LOSSES[name], whole, options)
    for rows in micro_batches:
        at, sequence = batch.take(rows)
        logits = batch.features[at] @ theta
        new = logits.log_softmax(-1)[torch.arange(len(at)), batch.actions[at]]
        chosen = None if selected is None else selected[at]
        inputs = LossInputs(new=new, old=batch.old[at], advantages=batch.advantages[at], sequence=sequence, selected=chosen)
        result = compute_policy_loss(name, inputs, options)
        weighed = correction_inputs(batch.old[at], batch.behaviour[at], sequence, batch.advantages[at] > 0.3, batch.advantages[at])
        correction = compute_correction(preset, weighed, correction_options(preset))
        parts.append(
            aggregate(result.per_token * correction.weights, episode_length=batch.episode_length[at], mode=mode, denominators=sizes)
        )
        stats.merge(result.stats)
        stats.merge(correction.stats)
    loss = torch.stack(parts).sum()
    (slope,) = torch.autograd.grad(loss, theta)
    return loss.detach(), slope, stats.result()


@st.composite
def layouts(draw: st.DrawFn, rows: int = 8) -> list[list[int]]:
    """The rows in any order, cut anywhere, empty micro-batches included."""
    order = draw(st.permutations(range(rows)))
    cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=rows)))
    edges = [0, *cuts, rows]
    return [order[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, mode) for name in ("ppo", "gspo", "cispo", "reinforce") for mode in AGGREGATIONS), *((name, "token-mean") for name in NEWER)],
)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), layout=layouts())
def test_gradient_is_invariant_to_order_micro_batches_and_shards(name: str, mode: str, seed: int, layout: list[list[int]]) -> None:
    batch = make(seed, rows=8)
    whole = loss_and_gradient(batch, [list(range(8))], name, mode)
    cut = loss_and_gradient(batch, layout, name, mode)
    torch.testing.assert_close(cut[:2], whole[:2], rtol=1e-9, atol=1e-12)
    assert cut[2] == pytest.approx(whole[2], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("preset", sorted(set(CORRECTIONS) - {"m2po"}))
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), layout=layouts())
def test_corrections_and_their_diagnostics_are_invariant(preset: str, seed: int, layout: list[list[int]]) -> None:
    batch = make(seed, rows=8)
    whole = loss_and_gradient(batch, [list(range(8))], "ppo", "token-mean", preset)
    cut = loss_and_gradient(batch, layout, "ppo", "token-mean", preset)
    torch.testing.assert_close(cut[:2], whole[:2], rtol=1e-9, atol=1e-12)
    assert cut[2] == pytest.approx(whole[2], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", ["ppo", "cispo", "reinforce"])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000))
def test_cutting_an_episode_into_branches_changes_no_token_level_loss(name: str, mode: str, seed: int) -> None:
    """Denominators count episodes, not rows."""
    batch = make(seed, rows=8)
    unbranched = Batch(
        features=batch.features,
        actions=batch.actions,
        old=batch.old,
        behaviour=batch.behaviour,
        advantages=batch.advantages,
        row=batch.episode_of_row[batch.row],
        episode_of_row=torch.arange(4),
    )
    branched = loss_and_gradient(batch, [list(range(8))], name, mode)
    whole = loss_and_gradient(unbranched, [list(range(4))], name, mode)
    torch.testing.assert_close(branched[:2], whole[:2], rtol=1e-9, atol=1e-12)
