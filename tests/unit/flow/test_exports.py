"""Weights that engines take together: the loops as they are, with a scripted learner and workers, on virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from agentrl.core.errors import EngineDeadError, TransferAbandonedError
from agentrl.core.protocols import EngineStats, Membership, TrainResult, WeightUpdate
from agentrl.core.types import GroupRequest
from agentrl.flow.driver import RunResult, train
from agentrl.flow.exports import JointLearner
from agentrl.flow.pool import RolloutPool
from agentrl.flow.worker_slots import Supervision
from tests.simulation import run_virtual
from tests.unit.flow.fakes import Recorder, ScriptedLearner, ScriptedWorker, endless_tasks, flow_of


@dataclass
class Group:
    """The transfer that is under way: engines wait in it for each other."""

    version: int = -1
    members: Membership | None = None
    arrived: set[str] = field(default_factory=set)
    changed: anyio.Event = field(default_factory=anyio.Event)
    given_up: str = ""

    def notify(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()


@dataclass
class Learner(ScriptedLearner):
    group: Group = field(default_factory=Group)
    training: bool = False
    exports: list[tuple[int, tuple[str, ...], int]] = field(default_factory=list)  # version, engines, epoch

    async def train(self, step: int, groups: Any) -> TrainResult:
        assert self.group.members is None, "a step began while weights were read"
        self.training = True
        result = await super().train(step, groups)
        self.training = False
        return result

    async def export_weights(self, version: int, members: Membership | None = None) -> WeightUpdate:
        assert members is not None
        assert not self.training
        assert version == len(self.steps), "the weights are those of another version"
        self.exports.append((version, members.engines, members.epoch))
        self.group.version, self.group.members, self.group.given_up = version, members, ""
        self.group.arrived = set()
        self.group.notify()
        return WeightUpdate(version=version, transport="scripted", members=members)

    async def abandon_weights(self, reason: str) -> None:
        self.group.given_up, self.group.members = reason, None
        self.group.notify()

    async def save_checkpoint(self, path: str, step: int) -> None:
        assert self.group.members is None, "weights are read"


@dataclass
class Engine(ScriptedWorker):
    name: str = ""
    group: Group = field(default_factory=Group)
    dies_at_load: int = -1
    dead: bool = False

    async def run_group(self, group_request: GroupRequest) -> Any:
        if self.dead:
            raise EngineDeadError("gone")
        return await super().run_group(group_request)

    async def stats(self) -> EngineStats:
        if self.dead:
            raise EngineDeadError("gone")
        return await super().stats()

    async def load_weights(self, update: WeightUpdate) -> int:
        group = self.group
        assert group.members == update.members
        if self.dead or update.version == self.dies_at_load:
            self.dead = True
            raise EngineDeadError("gone")
        group.arrived.add(self.name)
        group.notify()
        while group.members == update.members and update.members and group.arrived != set(update.members.engines):
            await group.changed.wait()
        if group.given_up:
            raise TransferAbandonedError(group.given_up)
        await anyio.sleep(self.load_s)
        self.loads.append(update.version)
        self.version = update.version
        if group.members == update.members:
            group.members = None  # all have them
        return update.version


def play(*, engines: int, staleness: int, dying: dict[int, int], steps: int = 6, start_s: float = 3.0) -> tuple[RunResult, Learner, Any]:
    group, learner = Group(), Learner(group=Group())
    learner.group = group
    made: list[Engine] = []

    def make(name: str, dies: int = -1) -> Engine:
        made.append(Engine(name=name, group=group, dies_at_load=dies))
        return made[-1]

    async def respawn(name: str) -> Engine:
        await anyio.sleep(start_s)
        return make(name)

    async def main() -> tuple[RunResult, RolloutPool]:
        workers = {f"engine-{index}": make(f"engine-{index}", dying.get(index, -1)) for index in range(engines)}
        pool = RolloutPool(workers, Supervision(respawn=respawn, check_every_s=0.5))
        observer = Recorder()
        result = await train(
            settings=flow_of(num_steps=steps, groups_per_step=2, n_samples_per_prompt=2, max_staleness=staleness),
            pool=pool,
            learner=JointLearner(learner, pool, version=0),
            tasks=endless_tasks(),
            observer=observer,
        )
        assert all(row["staleness/max"] <= staleness for row in observer.steps)
        return result, pool

    result, pool = run_virtual(main)
    return result, learner, pool


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_step_waits_for_the_publication_before_it(staleness: int) -> None:
    result, learner, _ = play(engines=3, staleness=staleness, dying={})
    assert result.steps == 6
    assert learner.exports == [(version, ("engine-0", "engine-1", "engine-2"), 1) for version in range(1, 7)]


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_group_that_loses_a_member_is_formed_anew(staleness: int) -> None:
    result, learner, pool = play(engines=3, staleness=staleness, dying={1: 2})
    assert result.steps == 6
    assert learner.exports[:3] == [(1, tuple(f"engine-{i}" for i in range(3)), 1), *[(2, ("engine-0", "engine-1", "engine-2"), 1)],
                                   (2, ("engine-0", "engine-2"), 2)]  # fmt: skip
    assert learner.exports[-1][:2] == (6, ("engine-0", "engine-1", "engine-2"))
    assert pool.metrics()["engine/live"] == 3
    epochs = [epoch for *_, epoch in learner.exports]
    assert epochs == sorted(epochs)


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_only_engine_is_lost_and_the_new_one_is_given_the_weights_of_the_learner(staleness: int) -> None:
    result, learner, _ = play(engines=1, staleness=staleness, dying={0: 3})
    assert result.steps == 6
    assert [version for version, *_ in learner.exports] == [1, 2, 3, 3, 4, 5, 6]


def test_a_new_engine_waits_for_the_publication_of_a_step_that_has_begun() -> None:
    """Its start takes as long as some steps of the others, so it is there while the learner trains, and takes part in what follows."""
    result, learner, pool = play(engines=2, staleness=1, dying={1: 1}, steps=12, start_s=4.3)
    assert result.steps == 12
    assert pool.metrics()["engine/live"] == 2
    alone = [engines for _, engines, _ in learner.exports if engines == ("engine-1",)]
    assert len(alone) <= 1
    assert learner.exports[-1][1] == ("engine-0", "engine-1")
