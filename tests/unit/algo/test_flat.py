"""A group is flat if the estimator gives every token of it 0: each estimator's word is held against the advantages that it computes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from agentrl.algo.advantages import AdvantageInputs, AdvantageOptions, Advantages
from agentrl.algo.estimators import ESTIMATORS, estimator_facts, find_estimator
from agentrl.algo.facts import advantage_estimator, facts_of
from agentrl.algo.filters import reject_flat
from agentrl.algo.flat import by_agent, clipped_rewards, equal_in_all, never_flat
from agentrl.algo.plan import AlgoConfig, flatness
from agentrl.core.errors import PluginError
from agentrl.core.summaries import GroupSummary, summarize
from agentrl.core.types import FinishReason, Group, Status, Task, Trajectory, Turn, floats, ints
from agentrl.learner.batch import advantage_inputs, collate
from tests.unit.flow.fakes import member

COMPARING = sorted(name for name in ESTIMATORS if estimator_facts(name).is_flat is not never_flat)
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "gigpo": [{}, {"step_advantage_weight": 0.0}, {"advantage_std_norm": False}],
    "gdpo": [{}, {"gdpo_weights": ("right=1", "short=0.5")}, {"gdpo_weights": ("right=1", "short=0")}],
    "pass_at_k": [{}, {"pass_at_k": 2}, {"pass_at_k": 3}],
    "turn_norm": [{}, {"gamma": 0.5}],
}


def turn(number: int, reward: float, state: str, masked: str = "") -> Turn:
    return Turn(
        prompt_ids=ints([1, number]),
        token_ids=ints([5, 6]),
        logprobs=floats([-1.0, -1.0]),
        versions=ints([0, 0]),
        finish_reason=FinishReason.STOP,
        fresh=bool(masked),
        reward=reward,
        state_key=state,
        masked=masked,
    )


def episode(name: str, rewards: list[float], states: list[str], beside: float = 0.0, parts: dict[str, float] | None = None) -> Trajectory:
    turns = tuple(turn(number, reward, state) for number, (reward, state) in enumerate(zip(rewards, states, strict=True)))
    total = sum(rewards) + beside
    return Trajectory(
        trajectory_id=name,
        episode_id=name,
        group_id=0,
        turns=turns,
        status=Status.FINISHED,
        reward=total,
        score=0.5,
        reward_parts=parts or {},
    )


def drawn(draw: random.Random) -> Group:
    """A group of few levels of reward, so that about half of them are flat for one estimator or another."""
    levels, size = draw.choice([(0.0, 1.0), (1.0, 1.0), (-3.0, 20.0), (0.0, 0.5)]), draw.randint(1, 4)
    members = []
    for number in range(size):
        length = draw.choice([1, 2, 2, 3])
        parts = {"right": draw.choice(levels), "short": draw.choice(levels)}
        states = [draw.choice("ab") for _ in range(length)]
        members.append(episode(str(number), [draw.choice(levels) for _ in range(length)], states, draw.choice([0.0, 0.0, 1.0]), parts))
    greedy = episode("greedy", [draw.choice(levels)], ["a"])
    return Group(group_id=0, task=Task("x"), trajectories=tuple(members), greedy=(greedy,))


def computed(name: str, group: Group, options: AdvantageOptions) -> torch.Tensor:
    """Advantages of the group alone, before they are whitened over the batch."""
    found = find_estimator(name)(advantage_inputs(collate([group])), options)
    return found.advantages if isinstance(found, Advantages) else found


@pytest.mark.parametrize("clip", [None, (-1.0, 1.0)])
@pytest.mark.parametrize(("name", "options"), [(name, options) for name in COMPARING for options in OPTIONS.get(name, [{}])])
def test_flat_is_what_has_no_advantage(name: str, options: dict[str, Any], clip: tuple[float, float] | None) -> None:
    draw, seen = random.Random(f"{name}{options}"), set[bool]()
    algo = AlgoConfig(advantage_estimator=name, options={**options, "reward_clip_range": clip})
    chosen = estimator_facts(name).options(**algo.options)
    for _ in range(300):
        group = drawn(draw)
        is_flat = flatness(algo)(summarize(group, seconds=1.0))
        nothing = bool((computed(name, group, chosen).abs() < 1e-4).all())
        assert is_flat == nothing, (name, options, [(t.reward, t.reward_parts, [u.reward for u in t.turns]) for t in group.trajectories])
        seen.add(is_flat)
    assert seen == {True, False}


@pytest.mark.parametrize("name", sorted(ESTIMATORS.keys() - set(COMPARING)))
def test_estimators_that_compare_nothing_in_a_group_learn_of_each(name: str) -> None:
    algo = AlgoConfig(advantage_estimator=name, teacher="org/name" if name == "distillation" else "")
    same = Group(group_id=0, task=Task("x"), trajectories=(episode("a", [1.0], ["a"]), episode("b", [1.0], ["a"])))
    assert reject_flat(summarize(same, seconds=1.0), flatness(algo)) is None


def test_rewards_that_differ_by_turn_component_or_greedy_episode_alone_are_no_flat_group() -> None:
    """Two episodes of equal totals, which a filter by totals calls flat."""
    members = (episode("a", [1.0, 0.0], ["s", "t"], parts={"right": 1.0}), episode("b", [0.0, 1.0], ["s", "u"]))
    group = summarize(Group(group_id=0, task=Task("x"), trajectories=members, greedy=(episode("g", [0.25], ["s"]),)), seconds=1.0)
    reasons = {name: reject_flat(group, flatness(AlgoConfig(advantage_estimator=name))) for name in ESTIMATORS}
    kept = {"gae", "turn_gae", "reinforce", "distillation", "remax", "gdpo", "turn_norm", "gigpo"}
    assert {name for name, reason in reasons.items() if reason is None} == kept
    assert reject_flat(group, flatness(AlgoConfig(teacher="org/name"))) is None


def test_masked_turns_and_what_an_episode_earned_beside_its_turns_are_as_in_the_batch() -> None:
    aside = episode("a", [1.0, 2.0], ["s", "t"], beside=0.5)
    aside = replace(aside, turns=(*aside.turns, turn(3, 7.0, "u", masked="a helper")), reward=10.5)
    group = Group(group_id=0, task=Task("x"), trajectories=(aside, replace(aside, trajectory_id="b", episode_id="b")))
    member = summarize(group, seconds=1.0).members[0]
    turns = advantage_inputs(collate([group])).turns(AdvantageOptions())
    assert list(member.turn_rewards) == turns.rewards.tolist()[:2] == [1.0, 9.5]
    assert member.states == (0, 1)


def test_agents_are_compared_with_themselves_only() -> None:
    members = tuple(replace(episode(name, [reward], ["s"]), agent=name[0]) for name, reward in (("a1", 1.0), ("b1", 0.0), ("a2", 1.0)))
    group = Group(group_id=0, task=Task("x"), trajectories=members)
    assert reject_flat(summarize(group, seconds=1.0), flatness(AlgoConfig())) == "zero_variance"
    moved = replace(members[2], reward=0.5, agent="a")
    assert reject_flat(summarize(replace(group, trajectories=(*members[:2], moved)), seconds=1.0), flatness(AlgoConfig())) is None
    states = summarize(group, seconds=1.0).members
    assert states[0].states == states[2].states != states[1].states


def test_an_estimator_of_a_user_that_compares_groups_is_asked_or_else_everything_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(group: GroupSummary, options: AdvantageOptions) -> bool:
        return 1 / group.group_id > 1  # division by zero in group 0

    @advantage_estimator(compares_group=True)
    def plain(inputs: AdvantageInputs, options: AdvantageOptions) -> torch.Tensor:
        return inputs.token_rewards

    @advantage_estimator(compares_group=True, flat=answer)
    def stated(inputs: AdvantageInputs, options: AdvantageOptions) -> torch.Tensor:
        return inputs.token_rewards

    @advantage_estimator
    def alone(inputs: AdvantageInputs, options: AdvantageOptions) -> torch.Tensor:
        return inputs.token_rewards

    assert facts_of(plain).is_flat is equal_in_all
    assert facts_of(alone).is_flat is never_flat
    assert facts_of(stated).is_flat is answer
    group = summarize(Group(group_id=0, task=Task("x"), trajectories=(episode("a", [1.0], ["s"]),)), seconds=1.0)
    monkeypatch.setattr("agentrl.algo.plan.facts.find", lambda *_: stated)
    with pytest.raises(PluginError, match="division by zero"):
        flatness(AlgoConfig())(group)


@pytest.mark.parametrize(("parts", "rewards"), [({"x": 1.0}, [1.0, 0.0]), ({}, [0.0, 1.0])])
def test_equal_in_all_looks_at_totals_components_and_turns(parts: dict[str, float], rewards: list[float]) -> None:
    one = episode("a", [1.0, 0.0], ["s", "t"])
    for other in (one, episode("b", rewards, ["s", "t"], parts=parts), episode("c", [1.0, 0.0], ["s", "t"], beside=1.0)):
        group = summarize(Group(group_id=0, task=Task("x"), trajectories=(one, other)), seconds=1.0)
        assert equal_in_all(group, AdvantageOptions()) is (other is one)


def test_a_lone_agent_is_compared_with_its_own_greedy_episode() -> None:
    both = tuple(member(reward, agent=name, frozen=name == "partner") for reward, name in ((1.0, "policy"), (9.0, "partner")))
    (part,) = by_agent(GroupSummary(group_id=0, members=both, versions=(0, 0), seconds=1.0, greedy=both))
    assert [each.agent for each in (*part.members, *part.greedy)] == ["policy", "policy"]


def test_only_episodes_that_are_trained_have_a_reward_to_compare() -> None:
    frozen = replace(member(reward=0.0), frozen=True)
    group = GroupSummary(group_id=0, members=(member(reward=1.0), frozen, member(reward=3.0)), versions=None, seconds=1.0)
    assert clipped_rewards(group, AdvantageOptions(reward_clip_range=(-2.0, 2.0))) == [1.0, 2.0]
