"""Estimators depend on who is in a group, and on nothing else about the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.algo.advantages import AdvantageInputs
from agentrl.algo.compute import compute_advantages
from agentrl.algo.estimators import ESTIMATORS
from tests.unit.algo.chosen import estimator_options

BALANCED = ["rloo", "group_norm", "dr_grpo"]
LOCAL = [*BALANCED, "pass_at_k"]
BY_LENGTH = ["opo", "turn_norm", "gigpo", "remax"]
WHITENED = ["gae", "turn_gae", "reinforce", "reinforce_baseline"]


@dataclass(frozen=True)
class Episode:
    group: int
    rewards: Tensor  # [T]
    values: Tensor  # [T]
    kl: Tensor  # [T]

    @property
    def turns(self) -> Tensor:
        """Turns of at most three tokens, the last one shorter."""
        return torch.arange(len(self.rewards)) // 3


def make(seed: int, groups: int = 4, members: int = 3) -> list[Episode]:
    g = torch.Generator().manual_seed(seed)

    def one(group: int) -> Episode:
        length = int(torch.randint(1, 8, (1,), generator=g))
        rewards = torch.where(torch.rand(length, generator=g) < 0.4, torch.randn(length, generator=g), torch.zeros(length))
        return Episode(group, 5 * rewards, torch.randn(length, generator=g), 0.1 * torch.randn(length, generator=g))

    return [one(group) for group in range(groups) for _ in range(members)]


def run(name: str, episodes: list[Episode]) -> list[Tensor]:
    """Advantages per episode."""
    lengths = [len(e.rewards) for e in episodes]
    empty = torch.zeros(0)
    inputs = AdvantageInputs(
        token_rewards=torch.cat([empty, *(e.rewards for e in episodes)]),
        episode=torch.repeat_interleave(torch.arange(len(episodes)), torch.tensor(lengths, dtype=torch.long)),
        group=torch.tensor([e.group for e in episodes], dtype=torch.long),
        rewards=torch.tensor([float(e.rewards.sum()) for e in episodes]),
        values=torch.cat([empty, *(e.values for e in episodes)]),
        kl=torch.cat([empty, *(e.kl for e in episodes)]),
        turn=torch.cat([empty.long(), *(100 * number + e.turns for number, e in enumerate(episodes))]),
        parts={
            "first": torch.tensor([float(e.rewards[0]) for e in episodes]),
            "rest": torch.tensor([float(e.rewards[1:].sum()) for e in episodes]),
        },
    )
    inputs = replace(inputs, baseline=inputs.group.float() - 1.0)
    return list(compute_advantages(name, inputs, estimator_options(name, gae_lambda=0.9)).advantages.split(lengths))


def same(left: list[Tensor], right: list[Tensor]) -> None:
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), order=st.permutations(range(12)))
def test_order_of_groups_and_members_does_not_matter(name: str, seed: int, order: list[int]) -> None:
    episodes = make(seed)
    same(run(name, [episodes[i] for i in order]), [run(name, episodes)[i] for i in order])


@pytest.mark.parametrize("name", [*LOCAL, *BY_LENGTH])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), failed=st.integers(0, 11))
def test_a_failed_member_changes_no_other_group(name: str, seed: int, failed: int) -> None:
    episodes = make(seed)
    before = run(name, episodes)
    survivors = [i for i in range(12) if i != failed]
    after = dict(zip(survivors, run(name, [episodes[i] for i in survivors]), strict=True))
    for i in survivors:
        if episodes[i].group != episodes[failed].group:
            assert torch.equal(after[i], before[i])


@pytest.mark.parametrize("name", WHITENED)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), failed=st.integers(0, 11))
def test_under_whitening_a_failed_member_only_moves_the_common_scale(name: str, seed: int, failed: int) -> None:
    """Whitening is one affine map for all tokens; which one depends on the batch, by definition."""
    episodes = make(seed)
    others = [i for i in range(12) if episodes[i].group != episodes[failed].group]
    survivors = [i for i in range(12) if i != failed]
    before = torch.cat([run(name, episodes)[i] for i in others])
    after = run(name, [episodes[i] for i in survivors])
    after_others = torch.cat([after[survivors.index(i)] for i in others])
    low, high = int(before.argmin()), int(before.argmax())
    if before[high] - before[low] < 1e-3:
        return
    scale = (after_others[high] - after_others[low]) / (before[high] - before[low])
    assert float(scale) > 0
    torch.testing.assert_close(after_others, after_others[low] + scale * (before - before[low]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", LOCAL)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), stretched=st.integers(0, 11), factor=st.integers(2, 5))
def test_an_episode_counts_once_however_many_tokens_or_branches_it_has(name: str, seed: int, stretched: int, factor: int) -> None:
    episodes = make(seed)
    e = episodes[stretched]
    idle = torch.zeros(len(e.rewards) * (factor - 1))
    longer = list(episodes)
    longer[stretched] = Episode(e.group, torch.cat([idle, e.rewards]), torch.cat([idle, e.values]), torch.cat([idle, e.kl]))
    before, after = run(name, episodes), run(name, longer)
    same([a for i, a in enumerate(after) if i != stretched], [b for i, b in enumerate(before) if i != stretched])
    same([after[stretched][-len(e.rewards) :]], [before[stretched]])


@settings(max_examples=50, deadline=None)
@given(rewards=st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16))
def test_group_advantages_sum_to_zero_and_group_norm_has_unit_deviation(rewards: list[float]) -> None:
    episodes = [Episode(0, torch.tensor([r]), torch.zeros(1), torch.zeros(1)) for r in rewards]
    for name in BALANCED:
        advantages = torch.cat(run(name, episodes))
        assert float(advantages.sum()) == pytest.approx(0.0, abs=1e-3)
    if max(rewards) - min(rewards) > 1e-3:
        assert float(torch.cat(run("group_norm", episodes)).std()) == pytest.approx(1.0, abs=1e-3)
