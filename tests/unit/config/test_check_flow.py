"""Rules on what is held back, and on what is not waited for."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.algo.plan import AlgoConfig
from agentrl.cluster.plan import RunConfig
from agentrl.config.mapping import to_json
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.flow.plan import FlowConfig
from agentrl.resolve.commands import load_eval
from agentrl.rollout.plan import EndpointConfig, PartnerConfig, RolloutConfig, SamplingConfig
from agentrl.track.plan import RecordConfig
from tests.given import checked as check

RUN = RunConfig(agent="gym:CartPole-v1")


def test_a_limit_on_episodes_leaves_room_for_a_group() -> None:
    with pytest.raises(ConfigError, match=r"--max-concurrent-episodes = 4: is less than a group of --n-samples-per-prompt 8"):
        check(TrainConfig(rollout=RolloutConfig(max_concurrent_episodes=4), sampling=SamplingConfig(n_samples_per_prompt=8), run=RUN))
    check(TrainConfig(rollout=RolloutConfig(max_concurrent_episodes=8), sampling=SamplingConfig(n_samples_per_prompt=8), run=RUN))


def test_requests_are_recorded_with_their_episodes_only() -> None:
    endpoint = EndpointConfig(record_requests=True)
    check(TrainConfig(run=RUN, endpoint=endpoint))
    with pytest.raises(ConfigError, match="--record none"):
        check(TrainConfig(record=RecordConfig(record="none"), run=RUN, endpoint=endpoint))


def test_a_budget_of_records_needs_records_within_a_budget() -> None:
    check(TrainConfig(record=RecordConfig(record=8.0), run=RUN))


def test_an_evaluation_of_a_run_has_records_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(to_json(TrainConfig(record=RecordConfig(record="budget"), run=RUN)))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert load_eval(["--run", str(tmp_path)]).measure.record == "all"
    assert load_eval(["--run", str(tmp_path), "--record", "sample"]).measure.record == "sample"


@pytest.mark.parametrize(
    ("flow", "algo", "n", "message"),
    [
        (FlowConfig(group_quorum=0.4), AlgoConfig(), 8, "--group-quorum = 0.4: would judge the rest by less than half"),
        (FlowConfig(group_quorum=0.9), AlgoConfig(), 8, "--group-quorum = 0.9: asks for all 8 episodes of a group. Use at most 0.875"),
        (FlowConfig(group_quorum=0.5), AlgoConfig(advantage_estimator="dr_grpo"), 8, "treat lengths alike. Leave out one of the two"),
    ],
)
def test_a_quorum_that_makes_no_sense_is_refused(flow: FlowConfig, algo: AlgoConfig, n: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(TrainConfig(sampling=SamplingConfig(n_samples_per_prompt=n), run=RUN, flow=flow, algo=algo))
    assert message in str(caught.value)


def test_a_quorum_of_most_of_a_group_is_fine() -> None:
    check(TrainConfig(run=RUN, flow=FlowConfig(group_quorum=0.75)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TrainConfig(run=RUN, flow=FlowConfig(branches=4)), "--branches = 4: has no effect without --branch-at"),
        (
            TrainConfig(run=RUN, flow=FlowConfig(branch_at="entropy:-1")),
            "--branch-at = 'entropy:-1': names no turn",
        ),
        (
            TrainConfig(run=RUN, flow=FlowConfig(branch_at=1, branches=3)),
            "--branches = 3: does not divide the group of --n-samples-per-prompt 8",
        ),
        (
            TrainConfig(run=RUN, flow=FlowConfig(branch_at=9)),
            "--branch-at = 9: is no turn of an episode of --max-turns 8, whose turns are 0",
        ),
        (
            TrainConfig(run=RUN, flow=FlowConfig(branch_at=1), partner=PartnerConfig(partner=("b=past",))),
            "--branch-at = 1: does not go with --partner",
        ),
    ],
)
def test_forks_fit_the_group(config: TrainConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert message in str(caught.value)
    check(TrainConfig(run=RUN, flow=FlowConfig(branch_at="entropy:0", branches=4)))
