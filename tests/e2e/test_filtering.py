"""Flat groups, where half of the tasks are always paid the same: whole episodes on a scripted engine, and on real vLLM."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentrl import Task
from agentrl.core.protocols import GenerationRequest, TrainResult
from agentrl.core.types import Group
from agentrl.flow.driver import RunResult, train
from agentrl.flow.pool import RolloutPool
from agentrl.resolve.commands import load_config
from agentrl.resolve.parts import episode_plan, flow_plan
from agentrl.rollout.worker import EpisodeWorker
from agentrl.suites.load import load_agent
from tests.e2e.runs import succeeded
from tests.e2e.runs import train as run_command
from tests.scripted_engine import ScriptedEngine
from tests.unit.flow.fakes import Recorder, ScriptedLearner
from tests.unit.rollout.scenes import CODEC
from tests.unit.rollout.templates import tokenizer

pytestmark = pytest.mark.anyio

KINDS = ("easy", "hard", "even", "open")
ENV = """
from agentrl import AgentInstance, StepResult, Task

PAID = {"easy": 1.0, "hard": 0.0, "even": 0.5}

class Mixed(AgentInstance):
    @classmethod
    def tasks(cls):
        return [Task(f"What is {i % 10}+{i // 10}?", label=("easy", "hard", "even", "open")[i % 4]) for i in range(40)]

    def step(self, state):
        right = len(state["action_text"]) % 2 == 1
        return StepResult(PAID.get(state["label"], float(right)), terminated=True)
"""


@dataclass
class KeepingLearner(ScriptedLearner):
    """Keeps the groups of each step."""

    trained: list[list[Group]] = field(default_factory=list)

    async def train(self, step: int, groups: Sequence[Group]) -> TrainResult:  # type: ignore[override]
        self.trained.append(list(groups))
        return await super().train(step, [f"ref {group.group_id}" for group in groups])


@dataclass
class Filtered:
    """One run, and what it left."""

    result: RunResult
    learner: KeepingLearner
    observer: Recorder

    @property
    def groups(self) -> list[Group]:
        return [group for step in self.learner.trained for group in step]

    def rewards(self) -> dict[int, list[float]]:
        """Group id -> rewards, of all groups that finished."""
        return {summary.group_id: [m.reward or 0.0 for m in summary.members] for summary in self.observer.groups}


def answer(request: GenerationRequest) -> Sequence[int]:
    """One or two letters, by the seed of the request."""
    word = random.Random(request.sampling.seed).choice(["a", "bb"])
    return CODEC.encode_text(f"{word}<|im_end|>")


def tasks(count: int | None = None) -> Iterable[Task]:
    numbers = iter(int, 1) if count is None else range(count)
    return (Task("Say a letter", label=KINDS[i % 4], id=str(i), position=i) for i, _ in enumerate(numbers))


async def filtered(folder: Path, *flags: str, count: int | None = None) -> Filtered:
    (folder / "env.py").write_text(ENV)
    tokenizer("chatml").save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 512}')
    common = ("--flat-groups", "resample", "--groups-per-step", "4", "--n-samples-per-prompt", "4")
    config = load_config(["--agent", str(folder / "env.py"), *common, *flags])
    settings = episode_plan(config).with_model(str(folder / "model"))
    engine = ScriptedEngine(answer=answer, delay=lambda request: random.Random(request.request_id).random() / 100)
    worker = EpisodeWorker(engine, load_agent(config.run.agent), settings)
    learner, observer = KeepingLearner(train_s=lambda step: 0.005), Recorder()
    await worker.start()
    try:
        result = await train(
            settings=flow_plan(config),
            pool=RolloutPool({"engine-0": worker}),
            learner=learner,
            tasks=tasks(count),
            observer=observer,
            keep=flow_plan(config).group_filter(),
        )
    finally:
        await worker.close()
    return Filtered(result, learner, observer)


@pytest.mark.parametrize("staleness", ["0", "2"])
@pytest.mark.parametrize("estimator", ["group_norm", "rloo"])
async def test_no_group_of_equal_rewards_is_trained(tmp_path: Path, staleness: str, estimator: str) -> None:
    run = await filtered(tmp_path, "--num-steps", "6", "--max-staleness", staleness, "--advantage-estimator", estimator)
    assert len(run.groups) == 24
    for group in run.groups:
        assert group.task.label == "open"
        assert len({trajectory.reward for trajectory in group.trajectories}) == 2
    assert [row["group/zero_variance"] for row in run.observer.steps] == [0.0] * 6


async def test_every_rejected_group_is_counted_under_its_reason(tmp_path: Path) -> None:
    counts = (await filtered(tmp_path, "--num-steps", "5")).result.counts
    assert counts.trained == 20
    assert set(counts.filtered) == {"too_easy", "too_hard", "zero_variance"}
    assert counts.submitted == counts.trained + sum(counts.filtered.values())


async def test_the_pass_rate_reported_is_the_one_counted_from_the_ledger(tmp_path: Path) -> None:
    run = await filtered(tmp_path, "--num-steps", "6")
    before = {"ledger/trained": 0.0, "ledger/filtered": 0.0}
    for row in run.observer.steps:
        passed, rejected = (row[name] - before[name] for name in ("ledger/trained", "ledger/filtered"))
        assert row["group/pass_rate"] == pytest.approx(passed / (passed + rejected))
        before = row
    differ = [len(set(rewards)) > 1 for rewards in run.rewards().values()]
    counts = run.result.counts
    assert counts.trained / (counts.trained + sum(counts.filtered.values())) == pytest.approx(sum(differ) / len(differ))


@pytest.mark.parametrize("staleness", ["0", "1", "3"])
async def test_accepted_groups_are_not_lost_when_tasks_run_out(tmp_path: Path, staleness: str) -> None:
    run = await filtered(tmp_path, "--num-steps", "1000", "--max-staleness", staleness, count=90)
    accepted = [group_id for group_id, rewards in sorted(run.rewards().items()) if len(set(rewards)) > 1]
    assert len(run.rewards()) == run.result.counts.submitted == 90
    assert [group.group_id for group in run.groups] == accepted
    assert [len(step) for step in run.learner.trained[:-1]] == [4] * (len(run.learner.trained) - 1)
    assert 0 < len(run.learner.trained[-1]) <= 4


async def test_a_narrower_range_of_scores(tmp_path: Path) -> None:
    run = await filtered(tmp_path, "--num-steps", "4", "--score-range", "0.3", "0.7")
    assert {sum(t.score or 0.0 for t in group.trajectories) for group in run.groups} == {2.0}  # 2 of 4


async def test_oversampled_groups_and_the_filter_together(tmp_path: Path) -> None:
    run = await filtered(tmp_path, "--num-steps", "6", "--max-staleness", "1", "--oversample", "0.5")
    counts = run.result.counts
    assert all(len({t.reward for t in group.trajectories}) == 2 for group in run.groups)
    assert (counts.trained, counts.dropped, counts.in_flight) == (24, {"oversampled": 12}, 0)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_on_the_real_engine(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(ENV)
    flags = (
        "--flat-groups",
        "resample",
        "--num-steps",
        "3",
        "--groups-per-step",
        "2",
        "--n-samples-per-prompt",
        "4",
        "--max-new-tokens",
        "6",
    )
    directory = tmp_path / "run"
    run = succeeded(run_command(directory, *flags, "--runtime", "local", "--record", "all", agent=tmp_path / "env.py"))
    rewards: dict[int, list[float]] = defaultdict(list)
    for line in (directory / "trajectories.jsonl").read_text().splitlines():
        record = json.loads(line)
        rewards[record["group_id"]].append(record["reward"])
    passed = Counter(len(set(group)) > 1 for group in rewards.values())
    last = run.metrics[-1]
    assert (last["ledger/trained"], last["ledger/filtered"]) == (passed[True], passed[False]) == (6, last["ledger/submitted"] - 6)
    assert passed[False] > 0
    assert [row["group/zero_variance"] for row in run.metrics] == [0, 0, 0]
