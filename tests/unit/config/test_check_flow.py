"""Rules on what is held back, and on what is not waited for."""

from __future__ import annotations

import pytest

from agentrl.config.check import check
from agentrl.config.schema import RolloutConfig, RunConfig, TrainConfig
from agentrl.core.errors import ConfigError

RUN = RunConfig(agent="gym:CartPole-v1")


def test_a_limit_on_episodes_leaves_room_for_a_group() -> None:
    with pytest.raises(ConfigError, match=r"--max-concurrent-episodes = 4: is less than a group of --n-samples-per-prompt 8"):
        check(TrainConfig(run=RUN, rollout=RolloutConfig(max_concurrent_episodes=4, n_samples_per_prompt=8)))
    check(TrainConfig(run=RUN, rollout=RolloutConfig(max_concurrent_episodes=8, n_samples_per_prompt=8)))
