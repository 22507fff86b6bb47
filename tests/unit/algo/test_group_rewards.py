"""Rewards of whole groups: the built-in ones, and functions of a user's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl import GroupAnswer, GroupAnswers, Task
from agentrl.algo.group_rewards import diversity, find_group_reward, group_reward_facts, majority, ranking
from agentrl.core.errors import ConfigError, PluginError


def group(*texts: str, rewards: tuple[float, ...] = ()) -> GroupAnswers:
    paid = rewards or (0.0,) * len(texts)
    return GroupAnswers(
        task=Task("?", id="t"), answers=tuple(GroupAnswer(texts=(text,), reward=reward) for text, reward in zip(texts, paid, strict=True))
    )


def test_the_majority_counts_final_answers() -> None:
    answers = group("So \\boxed{1} or \\boxed{4}", "<answer> 4 </answer>", "long way\n#### 4", "#### 5")
    assert majority(answers) == [1.0, 1.0, 1.0, 0.0]
    assert majority(group("Yes  sir", "yes sir", "no")) == [1.0, 1.0, 0.0]
    assert majority(group("a", "b")) == [1.0, 0.0]


def test_ranks_go_from_0_to_1_and_equal_rewards_share_theirs() -> None:
    assert ranking(group(*"abcd", rewards=(5.0, -1.0, 5.0, 7.0))) == pytest.approx([0.5, 0.0, 0.5, 1.0])
    assert ranking(group(*"ab", rewards=(2.0, 2.0))) == [0.5, 0.5]
    assert ranking(group("a")) == [0.0]


def test_diversity_is_the_distance_from_the_others() -> None:
    assert diversity(group("one two", "one two", "three four")) == pytest.approx([0.5, 0.5, 1.0])
    assert diversity(group("a b", "a c")) == pytest.approx([2 / 3, 2 / 3])
    assert diversity(group("", "")) == [0.0, 0.0]


OWN = """
import agentrl

@agentrl.group_reward
def lengths(group):
    return [len(answer.text) for answer in group.answers]

@agentrl.group_reward(compares_group=False)
def short(group):
    return [1.0]

@agentrl.group_reward
def fails(group):
    return [1 / 0 for answer in group.answers]

def plain(group):
    return []
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_a_function_of_a_file(file: Path) -> None:
    assert find_group_reward(f"{file}:lengths")(group("a", "bcd")) == [1.0, 3.0]
    assert group_reward_facts(f"{file}:lengths").compares_group
    assert not group_reward_facts(f"{file}:short").compares_group


@pytest.mark.parametrize(
    ("name", "words"), [("short", "one finite number for each answer"), ("fails", r"raised ZeroDivisionError: division by zero \(.*own.py")]
)
def test_what_cannot_be_used_names_the_function(file: Path, name: str, words: str) -> None:
    with pytest.raises(PluginError, match=words) as caught:
        find_group_reward(f"{file}:{name}")(group("a", "b"))
    assert f"--group-reward: {name} of {file}" in str(caught.value)


@pytest.mark.parametrize(("spec", "words"), [("plain", "was not made by @agentrl.group_reward"), ("", "Choose one of majority")])
def test_what_is_no_group_reward_is_refused(file: Path, spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_group_reward(f"{file}:{spec}" if spec else "vote")
