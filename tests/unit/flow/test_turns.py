"""Engines and learner that share GPUs: the loops run as they are, and every call that moves memory is recorded."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from agentrl.core.errors import EngineDeadError, WeightSyncError
from agentrl.core.protocols import Membership, Memory, TrainResult, WeightUpdate
from agentrl.core.types import GroupRequest, Task
from agentrl.flow.checkpoint import Progress
from agentrl.flow.driver import RunResult, train
from agentrl.flow.exports import JointLearner
from agentrl.flow.pool import RolloutPool
from agentrl.flow.state import SafePoint
from agentrl.flow.turns import TimeSharedLearner
from agentrl.flow.worker_slots import Supervision
from tests.simulation import run_virtual
from tests.unit.flow.fakes import Recorder, ScriptedLearner, ScriptedWorker, endless_tasks, flow_of

STEP = [
    *("sleep 1", "reload", "train", "offload all but weights", "wake weights", "export", "load"),
    *("offload", "wake weights kv_cache"),
]
"""Calls of a step; the second wake finds the weights awake already."""
OWN_TURN = ["sleep 1", "reload", "{}", "offload", "wake weights kv_cache"]
"""Calls around something that the learner does between two steps, after which no weights follow."""


@dataclass
class Gpu:
    """What is in the memory of the shared GPU; nobody may overlap."""

    calls: list[str] = field(default_factory=list)
    learner: set[str] = field(default_factory=lambda: {"weights", "optimizer"})

    def note(self, call: str) -> None:
        self.calls.append(call)


@dataclass
class Engine(ScriptedWorker):
    """A worker whose calls are recorded, and that refuses what its memory does not allow."""

    gpu: Gpu = field(default_factory=Gpu)
    awake: set[str] = field(default_factory=lambda: {"weights", "kv_cache"})
    level: int = 0
    fails_load: int = -1
    broken: bool = False
    quiet: bool = False

    def note(self, call: str) -> None:
        if not self.quiet:
            self.gpu.note(call)

    async def run_group(self, group_request: GroupRequest) -> Any:
        assert not self.gpu.learner, "the learner's state is on the GPU while something is generated"
        return await super().run_group(group_request)

    async def sleep(self, level: int) -> None:
        self.note(f"sleep {level}")
        assert self.awake == {"weights", "kv_cache"}
        assert not self.gpu.learner
        self.awake, self.level = set(), level

    async def wake(self, *parts: Memory) -> None:
        self.note(f"wake {' '.join(parts)}")
        await anyio.sleep(0.01)
        assert "optimizer" not in self.gpu.learner, "there is no room"
        if "kv_cache" in parts:
            assert not self.gpu.learner, "there is no room"
        assert "weights" not in parts or "weights" in self.awake or self.level == 1 or self.gpu.learner, "the weights are gone"
        self.awake |= set(parts)

    async def load_weights(self, update: WeightUpdate) -> int:
        self.note("load")
        if self.broken or update.version == self.fails_load:
            self.broken = True
            raise WeightSyncError("half loaded")
        assert "weights" in self.awake
        return await super().load_weights(update)


@dataclass
class Learner(ScriptedLearner):
    """A learner whose calls are recorded."""

    gpu: Gpu = field(default_factory=Gpu)
    first_version: int = 0

    async def offload(self, *, keep_weights: bool) -> None:
        self.gpu.note("offload all but weights" if keep_weights else "offload")
        await anyio.sleep(0.01)
        self.gpu.learner &= {"weights"} if keep_weights else set()

    async def reload(self) -> None:
        self.gpu.note("reload")
        await anyio.sleep(0.01)
        self.gpu.learner = {"weights", "optimizer"}

    async def train(self, step: int, groups: Sequence[str]) -> TrainResult:
        self.needs("train", "optimizer")
        return await super().train(step - self.first_version, groups)

    async def export_weights(self, version: int, members: Membership | None = None) -> WeightUpdate:
        self.needs("export", "weights")
        return WeightUpdate(version=version, transport="scripted", members=members)

    async def save_checkpoint(self, path: str, step: int) -> None:
        self.needs("save checkpoint", "optimizer")
        await anyio.sleep(0.5)

    async def load_checkpoint(self, path: str) -> int:
        self.needs("load checkpoint", "optimizer")
        return self.first_version

    async def save_model(self, path: str) -> None:
        self.needs("save model", "weights")

    def needs(self, call: str, what: str) -> None:
        self.gpu.note(call)
        assert what in self.gpu.learner, f"{call}: the learner's {what} are not on the GPU"


class Saving:
    """Writes nothing but the learner's part."""

    def __init__(self, learner: TimeSharedLearner, every: int) -> None:
        self._learner, self._every = learner, every

    def due(self, step: int) -> bool:
        return step % self._every == 0

    def metrics(self) -> dict[str, float]:
        return {}

    @asynccontextmanager
    async def saving(self, progress: Progress) -> AsyncIterator[str]:
        await self._learner.save_checkpoint("x", progress.step)
        yield "x"


def play(
    engines: Callable[[Gpu], list[Engine]] = lambda gpu: [Engine(gpu=gpu)],
    *,
    steps: int = 2,
    level: int = 1,
    save_every: int = 0,
    hook: Callable[[RolloutPool, TimeSharedLearner, SafePoint], Any] | None = None,
    supervised: Callable[[Gpu], Engine] | None = None,
    resumed_at: int = 0,
    after: Callable[[TimeSharedLearner], Any] | None = None,
    joint: bool = False,
) -> SimpleNamespace:
    """Run the loops on engines and a learner that share a GPU; returns the run, its pool, and the calls in their order."""
    gpu = Gpu()
    found = SimpleNamespace(gpu=gpu, pool=None, result=None)

    async def respawn(name: str) -> Engine:
        assert supervised is not None
        gpu.note("respawn")
        assert not gpu.learner, "an engine is started while the learner has the GPU"
        await anyio.sleep(3.0)
        assert not gpu.learner, "the learner took the GPU while an engine was started"
        return supervised(gpu)

    async def main() -> RunResult:
        workers = {f"engine-{index}": engine for index, engine in enumerate(engines(gpu))}
        pool = found.pool = RolloutPool(workers, Supervision(respawn=respawn) if supervised else None)
        own: Any = Learner(gpu=gpu, first_version=resumed_at)
        learner = TimeSharedLearner(JointLearner(own, pool, version=resumed_at) if joint else own, pool, sleep_level=level)
        await learner.start()
        if resumed_at:
            await learner.load_checkpoint("x")

        async def between(point: SafePoint) -> Mapping[str, float]:
            return {} if hook is None else await hook(pool, learner, point)

        result = await train(
            settings=flow_of(num_steps=resumed_at + steps, groups_per_step=2, n_samples_per_prompt=2),
            pool=pool,
            learner=learner,
            tasks=endless_tasks(),
            observer=Recorder(),
            after_step=[between],
            progress=Progress(step=resumed_at, trained=2 * resumed_at),
            checkpoints=Saving(learner, save_every) if save_every else None,  # type: ignore[arg-type]
        )
        if after is not None:
            await after(learner)
        return result

    found.result = run_virtual(main)
    return found


def around(call: str) -> list[str]:
    return [part.format(call) for part in OWN_TURN]


def test_the_order_of_a_synchronous_run_is_exact() -> None:
    run = play(steps=3)
    assert run.result.steps == 3
    assert run.gpu.calls == ["offload", *STEP * 3]
    assert not run.gpu.learner


def test_weights_that_are_replaced_need_not_be_kept() -> None:
    run = play(level=2)
    assert run.gpu.calls == ["offload", *(call.replace("sleep 1", "sleep 2") for call in STEP * 2)]


def test_a_checkpoint_and_the_model_at_the_end_take_turns_of_their_own() -> None:
    run = play(level=2, save_every=2, after=lambda learner: learner.save_model("x"))
    steps = [call.replace("sleep 1", "sleep 2") for call in STEP * 2]
    assert run.gpu.calls == ["offload", *steps, *around("save checkpoint"), *around("save model")]


def test_an_evaluation_finds_the_engines_awake_and_the_best_model_takes_a_turn() -> None:
    async def evaluate(pool: RolloutPool, learner: TimeSharedLearner, point: SafePoint) -> Mapping[str, float]:
        await point.until_live()
        summary, _ = await pool.run_group(GroupRequest(group_id=99, task=Task("x"), n_samples_per_prompt=2, version=point.step))
        assert summary.versions == (point.step, point.step)
        await learner.save_model("best")
        return {}

    run = play(hook=evaluate)
    assert run.gpu.calls == ["offload", *[*STEP, *around("save model")] * 2]


def test_a_resumed_run_loads_and_publishes_in_turns() -> None:
    run = play(resumed_at=4, steps=1)
    published = [call for call in STEP if call != "train"]
    assert run.gpu.calls == ["offload", *around("load checkpoint"), *published, *STEP]


def test_an_engine_that_fails_a_publication_is_replaced_in_the_engines_turn() -> None:
    """The others are woken all the same, and the new one is there before the learner trains again."""
    run = play(lambda gpu: [Engine(gpu=gpu, fails_load=1), Engine(gpu=gpu, quiet=True)], supervised=lambda gpu: Engine(gpu=gpu), steps=3)
    calls = run.gpu.calls
    first = [*STEP[:-1], "respawn", "load"]  # the broken one is not woken any more
    assert calls[: 1 + len(first)] == ["offload", *first]
    assert calls[1 + len(first) :] == STEP * 2
    assert run.pool.metrics()["engine/restarts"] == 1


def test_when_every_engine_fails_a_publication_it_ends_with_the_replacement() -> None:
    run = play(lambda gpu: [Engine(gpu=gpu, fails_load=1)], supervised=lambda gpu: Engine(gpu=gpu))
    assert run.gpu.calls == ["offload", *STEP[:-1], "respawn", "load", *STEP]
    assert run.result.steps == 2


def test_without_supervision_a_failed_publication_ends_the_run() -> None:
    with pytest.raises(WeightSyncError, match="half loaded"):
        play(lambda gpu: [Engine(gpu=gpu, fails_load=1)])


@pytest.mark.parametrize("moment", ["sleep", "wake"])
def test_an_engine_that_cannot_sleep_or_wake_is_lost_and_replaced(moment: str) -> None:
    class Stubborn(Engine):
        async def sleep(self, level: int) -> None:
            if moment == "sleep":
                self.awake = set()
                raise EngineDeadError("no sleep")
            await super().sleep(level)

        async def wake(self, *parts: Memory) -> None:
            if moment == "wake":
                raise EngineDeadError("no memory")
            await super().wake(*parts)

    others = itertools.count()
    run = play(
        lambda gpu: [Stubborn(gpu=gpu, quiet=True), Engine(gpu=gpu)],
        supervised=lambda gpu: Engine(gpu=gpu, quiet=next(others) == 0),
        steps=3,
    )
    assert run.result.steps == 3
    assert run.pool.metrics()["engine/restarts"] == 1
    assert [call for call in run.gpu.calls if call != "respawn"] == ["offload", *STEP * 3]


def test_an_engine_that_is_not_there_in_time_is_lost() -> None:
    class Slow(Engine):
        async def load_weights(self, update: WeightUpdate) -> int:
            await anyio.sleep_forever()
            return 0

    with pytest.raises(WeightSyncError, match="no answer within 300 s"):
        play(lambda gpu: [Slow(gpu=gpu)])


def test_engines_that_take_weights_together_take_the_same_turns() -> None:
    run = play(joint=True, save_every=2)
    assert run.gpu.calls == ["offload", *STEP * 2, *around("save checkpoint")]


def test_an_engine_that_is_replaced_is_served_by_the_learner_in_a_turn_of_its_own() -> None:
    """It is put to sleep, so that there is room for the weights of the learner, which are in CPU memory when it has started."""
    run = play(lambda gpu: [Engine(gpu=gpu, fails_load=1)], supervised=lambda gpu: Engine(gpu=gpu), joint=True)
    served = ["sleep 1", "reload", "offload all but weights", "wake weights", "export", "load", "offload", "wake weights kv_cache"]
    assert run.gpu.calls == ["offload", *STEP[:-1], "respawn", *served, *STEP]
