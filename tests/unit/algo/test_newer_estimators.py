"""Estimators by turn, by length, for the best of k and for several rewards: against verl and TRL where they have them, else written out."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="verl needs Python before 3.13")

from verl.trainer.ppo import core_algos

from agentrl.algo.advantages import AdvantageInputs
from agentrl.algo.compute import compute_advantages
from agentrl.algo.estimators.gae import GaeOptions
from agentrl.algo.statistics import segment_sum
from agentrl.core.errors import BatchError
from tests.unit.algo.chosen import estimator_options
from tests.unit.algo.ragged import Ragged, outcome_inputs, ragged

SEEDS = range(3)
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def turned(seed: int, **extra: Any) -> tuple[Ragged, AdvantageInputs]:
    """Episodes in turns of at most three tokens, each with a reward at its last token."""
    batch = ragged(seed)
    start = (batch.last + 1 - batch.lengths)[batch.episode]
    place = torch.arange(batch.size) - start
    turn = 100 * batch.episode + place // 3
    ends = torch.cat([turn[1:] != turn[:-1], torch.ones(1, dtype=torch.bool)])
    rewards = batch.randn(batch.size).where(ends, torch.tensor(0.0))
    extra = {name: values(batch) for name, values in extra.items()}
    total = segment_sum(rewards, batch.episode, len(batch.lengths))
    return batch, AdvantageInputs(token_rewards=rewards, episode=batch.episode, group=batch.group, rewards=total, turn=turn, **extra)


def with_parts(batch: Ragged, parts: dict[str, torch.Tensor]) -> AdvantageInputs:
    rewards = torch.stack(list(parts.values())).sum(0)
    return AdvantageInputs(token_rewards=batch.at_end(rewards), episode=batch.episode, group=batch.group, rewards=rewards, parts=parts)


@pytest.mark.parametrize("seed", SEEDS)
def test_opo_of_verl(seed: int) -> None:
    batch = ragged(seed)
    rewards = batch.randn(len(batch.lengths))
    ours = compute_advantages("opo", outcome_inputs(batch, rewards), estimator_options("opo"))
    theirs, _ = core_algos.compute_opo_outcome_advantage(batch.pad(batch.at_end(rewards)), batch.mask.float(), batch.index)
    torch.testing.assert_close(ours.advantages, batch.flat(theirs), **TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
def test_remax_of_verl(seed: int) -> None:
    batch = ragged(seed)
    rewards, greedy = batch.randn(12), batch.randn(4).repeat_interleave(3)
    inputs = AdvantageInputs(
        token_rewards=batch.at_end(rewards), episode=batch.episode, group=batch.group, rewards=rewards, baseline=greedy
    )
    ours = compute_advantages("remax", inputs, estimator_options("remax"))
    theirs, _ = core_algos.compute_remax_outcome_advantage(batch.pad(batch.at_end(rewards)), greedy, batch.mask.float())
    torch.testing.assert_close(ours.advantages, batch.flat(theirs), **TOLERANCE)


def test_remax_needs_a_greedy_episode_of_each_task() -> None:
    batch = ragged(0)
    with pytest.raises(BatchError, match="greedy episode"):
        compute_advantages("remax", outcome_inputs(batch, batch.randn(12)), estimator_options("remax"))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("divide", [True, False])
def test_pass_at_the_size_of_the_group_of_verl(seed: int, divide: bool) -> None:
    batch = ragged(seed)
    rewards = batch.randn(len(batch.lengths))
    ours = compute_advantages("pass_at_k", outcome_inputs(batch, rewards), estimator_options("pass_at_k", advantage_std_norm=divide))
    theirs, _ = core_algos.compute_grpo_passk_outcome_advantage(
        batch.pad(batch.at_end(rewards)), batch.mask.float(), batch.index, epsilon=1e-9, config={"norm_adv_by_std_in_grpo": divide}
    )
    torch.testing.assert_close(ours.advantages, batch.flat(theirs), **TOLERANCE)


@pytest.mark.parametrize("k", [2, 3, 4, 6])
def test_pass_at_k_is_the_mean_over_all_sets(k: int) -> None:
    """The best reward of a set with the episode, less that of the set without it."""
    batch = ragged(1, groups=2, members=6)
    rewards = batch.randn(12).round(decimals=1)  # some are equal
    found = compute_advantages(
        "pass_at_k", outcome_inputs(batch, rewards), estimator_options("pass_at_k", pass_at_k=k, advantage_std_norm=False)
    )
    for episode in range(12):
        group = range(6) if episode < 6 else range(6, 12)
        sets = list(itertools.combinations([other for other in group if other != episode], k - 1))
        best = [max(float(rewards[other]) for other in others) for others in sets]
        raised = sum(max(float(rewards[episode]) - without, 0.0) for without in best) / len(sets)
        assert found.advantages[batch.last[episode]] == pytest.approx(raised, abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_gdpo_of_verl(seed: int) -> None:
    batch = ragged(seed)
    parts = {"correct": batch.randn(len(batch.lengths)), "format": 5.0 * batch.randn(len(batch.lengths))}
    inputs = AdvantageInputs(
        token_rewards=torch.zeros(batch.size),
        episode=batch.episode,
        group=batch.group,
        rewards=torch.zeros(len(batch.lengths)),
        parts=parts,
    )
    ours = compute_advantages(
        "gdpo", inputs, estimator_options("gdpo", gdpo_weights=("correct=1", "format=0.3"), reward_clip_range=(-99, 99))
    )
    rows, length = batch.mask.shape
    theirs, _ = core_algos.compute_gdpo_outcome_advantage(
        torch.zeros(rows, length),
        batch.mask.float(),
        batch.index,
        epsilon=1e-9,
        config={"gdpo_reward_keys": ["correct", "format"], "gdpo_reward_weights": [1.0, 0.3]},
        non_tensor_batch={name: part.numpy() for name, part in parts.items()},
        # verl puts the reward at the last token that is attended to; the estimator only looks at the sum.
        batch={"prompts": torch.zeros(rows, 0), "attention_mask": torch.ones(rows, length, dtype=torch.long)},
    )
    whitened = math.sqrt((batch.size - 1) / batch.size)
    torch.testing.assert_close(ours.advantages * whitened, batch.flat(theirs), **TOLERANCE)


def test_gdpo_needs_components() -> None:
    batch = ragged(0)
    with pytest.raises(BatchError, match="reward_parts: any missing, found none"):
        compute_advantages("gdpo", outcome_inputs(batch, batch.randn(12)), estimator_options("gdpo"))
    inputs = AdvantageInputs(
        token_rewards=torch.zeros(batch.size),
        episode=batch.episode,
        group=batch.group,
        rewards=torch.zeros(12),
        parts={"a": torch.ones(12)},
    )
    with pytest.raises(BatchError, match="b missing, found a"):
        compute_advantages("gdpo", inputs, estimator_options("gdpo", gdpo_weights=("b=1",)))


def test_gdpo_hears_the_weak_reward_that_a_sum_drowns() -> None:
    """Two components of very different size, and one group: each alone tells two episodes apart, and counts the same."""
    batch = ragged(0, groups=1, members=3)
    parts = {"big": torch.tensor([9.0, 0.0, 0.0]), "small": torch.tensor([0.0, 0.01, 0.0])}
    inputs = with_parts(batch, parts)
    found = compute_advantages("gdpo", inputs, estimator_options("gdpo", advantage_std_norm=True)).advantages[batch.last]
    assert float(found[0]) == pytest.approx(float(found[1]), abs=1e-5)
    assert float(found[2]) < float(found[0]) - 1.0


@pytest.mark.parametrize("seed", SEEDS)
def test_batch_std_of_trl(seed: int) -> None:
    """TRL's ``scale_rewards="batch"``, lines of its trainer: the group's mean, and the deviation of all rewards."""
    from trl.trainer.utils import nanstd

    batch = ragged(seed)
    rewards = batch.randn(12)
    theirs = (rewards - rewards.view(4, 3).mean(1).repeat_interleave(3)) / (nanstd(rewards) + 1e-9)
    ours = compute_advantages("batch_std", outcome_inputs(batch, rewards), estimator_options("batch_std"))
    torch.testing.assert_close(ours.advantages[batch.last], theirs, **TOLERANCE)
    same = compute_advantages("batch_std", outcome_inputs(batch, torch.full((12,), 0.1)), estimator_options("batch_std"))
    assert float(same.advantages.abs().max()) == 0.0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8)])
def test_turn_gae_is_gae_of_verl_on_turns(seed: int, gamma: float, lam: float) -> None:
    """With a turn as one token of verl's: its reward, minus its KL, and the value at its first token."""
    batch, inputs = turned(seed, values=lambda b: b.randn(b.size), kl=lambda b: 0.1 * b.randn(b.size))
    options = GaeOptions(gamma=gamma, gae_lambda=lam, reward_clip_range=(-1e9, 1e9), advantage_std_norm=False)
    ours = compute_advantages("turn_gae", inputs, options)
    assert inputs.values is not None
    assert inputs.kl is not None
    assert ours.returns is not None
    assert inputs.turn is not None
    rewards, values, mask = torch.zeros(12, 9), torch.zeros(12, 9), torch.zeros(12, 9)
    place = torch.zeros(batch.size, dtype=torch.long)
    for episode in range(12):
        tokens = (batch.episode == episode).nonzero()[:, 0]
        for number, turn in enumerate(inputs.turn[tokens].unique()):
            mine = tokens[inputs.turn[tokens] == turn]
            rewards[episode, number] = (inputs.token_rewards - inputs.kl)[mine].sum()
            values[episode, number], mask[episode, number], place[mine] = inputs.values[mine[0]], 1.0, number
    _, returns = core_algos.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(ours.returns, returns[batch.episode, place], **TOLERANCE)
    raw = (returns - values)[batch.episode, place]
    torch.testing.assert_close(ours.advantages, raw - raw.mean(), **TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", [1.0, 0.7])
def test_turn_norm_is_grpo_of_verl_on_each_turn(seed: int, gamma: float) -> None:
    """With what is earned from a turn on as the reward, and the turns at one place of the group's episodes as a group of verl's."""
    batch, inputs = turned(seed)
    ours = compute_advantages("turn_norm", inputs, estimator_options("turn_norm", gamma=gamma, reward_clip_range=(-1e9, 1e9)))
    assert inputs.turn is not None
    firsts, ahead, index = [], [], []
    for episode in range(12):
        tokens = (batch.episode == episode).nonzero()[:, 0]
        turns = [tokens[inputs.turn[tokens] == turn] for turn in inputs.turn[tokens].unique()]
        earned = [float(inputs.token_rewards[turn].sum()) for turn in turns]
        for number, turn in enumerate(turns):
            firsts.append(int(turn[0]))
            ahead.append(sum(gamma**later * reward for later, reward in enumerate(earned[number:])))
            index.append(f"{int(batch.group[episode])} {number}")
    rewards = torch.tensor(ahead)[:, None]
    theirs, _ = core_algos.compute_grpo_outcome_advantage(
        rewards, torch.ones_like(rewards), np.array(index, dtype=object), epsilon=1e-9, norm_adv_by_std_in_grpo=True
    )
    alone = torch.tensor([index.count(name) == 1 for name in index])
    expected = theirs[:, 0].where(~alone, torch.tensor(0.0))  # verl gives a lone member its reward
    torch.testing.assert_close(ours.advantages[torch.tensor(firsts)], expected, **TOLERANCE)
    assert bool(alone.any())


def test_turn_norm_of_single_turns_is_group_norm() -> None:
    batch = ragged(4)
    inputs = outcome_inputs(batch, batch.randn(12), kl=0.1 * batch.randn(batch.size))
    found = [compute_advantages(name, inputs, estimator_options(name)).advantages for name in ("turn_norm", "group_norm")]
    torch.testing.assert_close(found[0], found[1], **TOLERANCE)


def test_a_good_turn_is_told_from_a_bad_one() -> None:
    """Equal totals: `group_norm` sees no difference, `turn_norm` sees which turn earned the reward."""
    episode = torch.tensor([0, 0, 1, 1])
    inputs = AdvantageInputs(
        token_rewards=torch.tensor([1.0, 0.0, 0.0, 1.0]),
        episode=episode,
        group=torch.tensor([0, 0]),
        rewards=torch.tensor([1.0, 1.0]),
        turn=torch.arange(4),
    )
    assert compute_advantages("group_norm", inputs, estimator_options("group_norm")).advantages.tolist() == [0.0] * 4
    found = compute_advantages("turn_norm", inputs, estimator_options("turn_norm")).advantages
    torch.testing.assert_close(found, torch.tensor([0.0, -0.5, 0.0, 0.5]) * math.sqrt(2))
