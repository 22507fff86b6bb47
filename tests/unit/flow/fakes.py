"""Scripted rollout workers and learner, to be run on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio

from agentrl.algo.filters import GroupFilter, keep_all
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.callbacks import Event, GroupJudged, StepEnd
from agentrl.core.manifest import FileEntry
from agentrl.core.process import on_thread
from agentrl.core.protocols import EngineStats, Membership, Memory, TrainResult, WeightUpdate
from agentrl.core.summaries import GroupSummary, MemberSummary
from agentrl.core.types import GroupRequest, Status, Task
from agentrl.flow.driver import RunResult, train
from agentrl.flow.pool import RolloutPool
from agentrl.flow.sizes import FlowPlan
from agentrl.flow.state import AfterStep
from agentrl.resolve.parts import flow_plan
from tests.simulation import run_virtual

T = TypeVar("T")


def member(reward: float | None = 1.0, status: Status = Status.FINISHED, **changes: Any) -> MemberSummary:
    values: dict[str, Any] = {
        "status": status,
        "reward": reward,
        "score": reward,
        "num_tokens": 10,
        "num_prompt_tokens": 20,
        "num_turns": 2,
        "truncated": False,
    }
    return MemberSummary(**{**values, **changes})


def failed_member(error: str = "ValueError: broken") -> MemberSummary:
    return member(None, Status.ENV_ERROR, error=error)


def group_summary(group_request: GroupRequest, versions: tuple[int, int], members: Sequence[MemberSummary] | None = None) -> GroupSummary:
    members = tuple(members) if members is not None else tuple(member(float(i % 2)) for i in range(group_request.n_samples_per_prompt))
    trainable = any(m.trainable for m in members)
    return GroupSummary(group_id=group_request.group_id, members=members, versions=versions if trainable else None, seconds=1.0)


def endless_tasks() -> Iterable[Task]:
    return (Task(prompt=f"task {i}", id=str(i), position=i) for i in iter(int, 1))


@dataclass
class ScriptedWorker:
    """Runs groups by the clock alone."""

    duration: Callable[[GroupRequest], float] = lambda group_request: 1.0
    outcome: Callable[[GroupRequest], Sequence[MemberSummary] | None] = lambda group_request: None
    load_s: float = 0.1
    reported: Callable[[int], int] = lambda version: version
    version: int = 0
    busy_s: float = 0.0
    tokens: int = 0
    live: set[int] = field(default_factory=set)
    seen: list[GroupRequest] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    closed: int = 0

    async def start(self) -> None:
        return

    async def run_group(self, group_request: GroupRequest) -> tuple[GroupSummary, str]:
        self.seen.append(group_request)
        self.live.add(group_request.group_id)
        oldest, seconds = self.version, self.duration(group_request)
        try:
            await anyio.sleep(seconds)
        finally:
            self.live.discard(group_request.group_id)
        self.busy_s += seconds
        summary = group_summary(group_request, (oldest, self.version), self.outcome(group_request))
        self.tokens += sum(m.num_tokens for m in summary.members)
        return summary, f"ref {group_request.group_id}"

    async def load_weights(self, update: WeightUpdate) -> int:
        await anyio.sleep(self.load_s)
        self.loads.append(update.version)
        self.version = update.version
        return self.reported(update.version)

    async def sleep(self, level: int) -> None:
        return

    async def wake(self, *parts: Memory) -> None:
        return

    async def stats(self) -> EngineStats:
        now = asyncio.get_running_loop().time()
        return EngineStats(busy_s=self.busy_s, clock_s=now, tokens=self.tokens, paused_s=self.load_s * len(self.loads))

    async def close(self) -> None:
        self.closed += 1


@dataclass
class ScriptedLearner:
    """Trains by the clock alone, and remembers what it was given."""

    train_s: Callable[[int], float] = lambda step: 1.0
    metrics: Mapping[str, float] = field(default_factory=lambda: {"loss/policy": 0.5})
    steps: list[list[str]] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)

    async def start(self) -> None:
        return

    async def train(self, step: int, groups: Sequence[str]) -> TrainResult:
        assert step == len(self.steps)
        begin = asyncio.get_running_loop().time()
        await anyio.sleep(self.train_s(step))
        self.spans.append((begin, asyncio.get_running_loop().time()))
        self.steps.append(list(groups))
        return TrainResult(metrics=self.metrics, seconds=self.spans[-1][1] - begin)

    async def export_weights(self, version: int, members: Membership | None = None) -> WeightUpdate:
        assert version == len(self.steps)
        return WeightUpdate(version=version, transport="scripted", members=members)

    async def abandon_weights(self, reason: str) -> None:
        return

    async def offload(self, *, keep_weights: bool) -> None:
        return

    async def reload(self) -> None:
        return

    async def save_model(self, path: str) -> None:
        return

    async def save_checkpoint(self, path: str, step: int) -> None:
        return

    async def flush_checkpoint(self, path: str) -> Mapping[str, FileEntry]:
        return {}

    async def map_files(self, work: Callable[..., T], files: Mapping[str, FileEntry], *arguments: Any) -> list[T]:
        return [await on_thread(work, files, *arguments)]

    async def load_checkpoint(self, path: str) -> int:
        return 0

    async def close(self) -> None:
        return

    @property
    def trained_ids(self) -> list[int]:
        return [int(ref.removeprefix("ref ")) for step in self.steps for ref in step]


@dataclass
class Recorder:
    """An observer that keeps everything."""

    stages: list[str] = field(default_factory=list)
    groups: list[GroupSummary] = field(default_factory=list)
    steps: list[dict[str, float]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def on_stage(self, name: str) -> None:
        self.stages.append(name)

    async def notify(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, GroupJudged):
            self.groups.append(event.summary)
        elif isinstance(event, StepEnd):
            self.steps.append(dict(event.metrics))


def flow_of(**values: Any) -> FlowPlan:
    """Settings of a flow in which an episode is compared with no other, but for `values` by the names of their flags."""
    return flow_plan(changed(TrainConfig(), **{"advantage_estimator": "reinforce", **values}))


@dataclass
class Scene:
    """One scripted run: its parts before, its traces after."""

    settings: FlowPlan
    workers: list[ScriptedWorker] = field(default_factory=lambda: [ScriptedWorker()])
    learner: ScriptedLearner = field(default_factory=ScriptedLearner)
    observer: Recorder = field(default_factory=Recorder)
    tasks: Iterable[Task] = field(default_factory=endless_tasks)
    keep: GroupFilter = keep_all
    after_step: Sequence[AfterStep] = ()

    async def go(self) -> RunResult:
        pool = RolloutPool({f"engine-{i}": worker for i, worker in enumerate(self.workers)})
        return await train(
            settings=self.settings,
            pool=pool,
            learner=self.learner,
            tasks=self.tasks,
            observer=self.observer,
            keep=self.keep,
            after_step=self.after_step,
        )

    def run(self) -> RunResult:
        return run_virtual(self.go)
