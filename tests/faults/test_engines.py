"""Engines that fail without dying, come back, or miss a publication."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest

from agentrl.config.sections import changed
from agentrl.core.errors import EngineDeadError, EngineError, WeightSyncError
from agentrl.core.protocols import EngineStats, GenerationRequest, WeightUpdate
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import Generation, GroupRequest, Task
from agentrl.engine.usage import UsageMeter
from agentrl.flow.driver import RunResult, train
from agentrl.flow.pool import RolloutPool
from agentrl.flow.sizes import FlowPlan
from agentrl.flow.worker_slots import Supervision
from agentrl.rollout.worker import EpisodeWorker
from agentrl.suites.load import load_agent
from tests.e2e.runs import ENVS, SMALL, Run, succeeded
from tests.faults.report import Saw
from tests.faults.support import disturbed, ended, lines
from tests.scripted_engine import ScriptedEngine
from tests.unit.flow.fakes import Recorder, ScriptedLearner, ScriptedWorker, endless_tasks, flow_of, run_virtual
from tests.unit.rollout.scenes import SETTINGS
from tests.unit.rollout.templates import tokenizer

ENV = """
from agentrl import AgentInstance, StepResult

class Env(AgentInstance):
    def step(self, state):
        return StepResult(1.0, terminated=True)
"""


@dataclass(slots=True)
class Mute(ScriptedEngine):
    """Says its counters, and fails every request."""

    meter: UsageMeter = field(default_factory=UsageMeter)

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        self.meter.failed("no answer")
        raise EngineError("no answer")

    def stats(self) -> EngineStats:
        return self.meter.stats()


@pytest.mark.anyio
@pytest.mark.row(3, "an engine fails every request and answers every look at its counters")
async def test_requests_that_fail_set_an_engine_aside_whatever_its_counters_say(tmp_path: Path, saw: Saw) -> None:
    tokenizer("chatml").save_pretrained(tmp_path / "model")
    (tmp_path / "env.py").write_text(ENV)
    agent, settings = load_agent(str(tmp_path / "env.py")), changed(SETTINGS, model=str(tmp_path / "model"))
    mute, successors = Mute(), []

    async def respawn(name: str) -> EpisodeWorker:
        successors.append(EpisodeWorker(ScriptedEngine(), agent, settings))
        await successors[-1].start()
        return successors[-1]

    workers = [EpisodeWorker(mute, agent, settings), EpisodeWorker(ScriptedEngine(delay=lambda request: 0.3), agent, settings)]
    for worker in workers:
        await worker.start()
    pool = RolloutPool({"engine-0": workers[0], "engine-1": workers[1]}, Supervision(respawn=respawn, check_every_s=0.01))
    summaries: list[GroupSummary] = []

    async def run(group_id: int) -> None:
        summaries.append(
            (await pool.run_group(GroupRequest(group_id=group_id, task=Task("x", id=str(group_id)), n_samples_per_prompt=1, version=0)))[0]
        )

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.supervise)
        await anyio.sleep(0.1)  # looks that it answers
        assert not mute.stats().fault
        with anyio.fail_after(10):
            for group_id in range(8):
                await run(group_id)
                await anyio.sleep(0.03)
        failed = [summary for summary in summaries if not summary.num_trainable]
        assert len(mute.requests) == 3
        assert len(successors) == 1
        assert len(failed) == 2  # what came before it was known; the third request's group ran again elsewhere
        assert all(member.reward is None for summary in failed for member in summary.members)
        assert pool.metrics()["engine/groups_run_again"] == 1
        tasks.cancel_scope.cancel()
    await pool.close()
    saw("set aside after 3 failed requests in a row and replaced; looks at its counters in between changed nothing")


@pytest.mark.faults
@pytest.mark.timeout(400)
@pytest.mark.row(3, "one of two real engines accepts requests, says its counters and never generates (--engine-timeout-s 6)")
def test_a_real_engine_that_never_generates_is_replaced(tmp_path: Path, saw: Saw) -> None:
    run_dir, steps = tmp_path / "run", "10"
    words = ("--async", "--num-steps", steps, "--num-engines", "2", "--engine-timeout-s", "6", "--record", "all", *SMALL)
    with disturbed(
        "--agent", str(ENVS / "arithmetic.py"), "--run-dir", str(run_dir), *words, faults="never_generate=20", folder=tmp_path
    ) as process:
        output = ended(process, 300)
    run = succeeded(Run(process.returncode, output, run_dir))
    assert len(lines(tmp_path / "never_generate.jsonl")) == 1
    assert "finished no request" in output
    last = run.metrics[-1]
    assert last["engine/restarts"] == 1
    names = [record["trajectory_id"] for record in lines(run_dir / "trajectories.jsonl")]
    assert len(names) == len(set(names))
    assert last["ledger/trained"] == 40
    assert last["failures/groups"] == 0
    saw(f"replaced; {last['engine/groups_run_again']:.0f} groups run again, all 10 steps done, no failed group")


@dataclass
class Mortal(ScriptedWorker):
    """Notes what it held when it was given a group; may die, or fail a load half way."""

    name: str = ""
    dies_s: float = math.inf
    fails_load: int = -1
    broken: bool = False
    given: list[tuple[int, int, int]] = field(default_factory=list)  # group, version of the group request, own version

    def check(self) -> None:
        if self.broken or anyio.current_time() >= self.dies_s:
            raise EngineDeadError(f"{self.name} is gone")

    async def run_group(self, group_request: GroupRequest) -> tuple[GroupSummary, str]:
        self.check()
        self.given.append((group_request.group_id, group_request.version, self.version))
        answer = await super().run_group(group_request)
        self.check()
        return answer

    async def load_weights(self, update: WeightUpdate) -> int:
        self.check()
        if update.version == self.fails_load:
            await anyio.sleep(self.load_s / 2)
            self.broken = True  # as the real engine, which fences itself
            raise WeightSyncError("half of the weights are new")
        return await super().load_weights(update)

    async def stats(self) -> EngineStats:
        self.check()
        return await super().stats()


@dataclass
class Play:
    """A run on mortal workers, and the workers that were started in their place."""

    workers: list[Mortal]
    settings: FlowPlan = field(default_factory=lambda: flow_of(num_steps=40, groups_per_step=4, n_samples_per_prompt=2, max_staleness=2))
    made: list[Mortal] = field(default_factory=list)
    observer: Recorder = field(default_factory=Recorder)
    learner: ScriptedLearner = field(default_factory=ScriptedLearner)
    make: Callable[[], Mortal] = lambda: Mortal(name="successor")

    async def respawn(self, name: str) -> Mortal:
        await anyio.sleep(4.0)
        self.made.append(self.make())
        return self.made[-1]

    def run(self) -> RunResult:
        async def main() -> RunResult:
            pool = RolloutPool({worker.name: worker for worker in self.workers}, Supervision(respawn=self.respawn, check_every_s=0.5))
            return await train(settings=self.settings, pool=pool, learner=self.learner, tasks=endless_tasks(), observer=self.observer)

        return run_virtual(main)

    def check(self, result: RunResult) -> None:
        """Each group trained once, and none on an engine with weights older than those that were live when it was admitted."""
        assert self.learner.trained_ids == list(range(40 * 4))
        assert (result.counts.submitted, result.counts.in_flight) == (160, 0)
        assert max(row["staleness/max"] for row in self.observer.steps) <= 2
        for worker in [*self.workers, *self.made]:
            assert all(held >= group_request for _, group_request, held in worker.given)


@pytest.mark.row(4, "one of two engines dies, and comes back with version 0")
def test_an_engine_that_comes_back_gets_no_group_before_it_holds_the_current_weights(saw: Saw) -> None:
    play = Play([Mortal(name="a", dies_s=9.3), Mortal(name="b")])
    play.check(play.run())
    (back,) = play.made
    assert back.loads[0] >= 5
    assert back.given
    assert min(held for _, _, held in back.given) >= back.loads[0]
    saw(f"{len(back.given)} groups, all with version {back.loads[0]} or newer; 0 tokens under a version it did not hold")


@pytest.mark.row(5, "one of two engines fails in the middle of loading version 7")
def test_half_a_publication_is_no_publication(saw: Saw) -> None:
    play = Play([Mortal(name="a", fails_load=7), Mortal(name="b")])
    play.check(play.run())
    broken, (back,) = play.workers[0], play.made
    assert broken.loads == [1, 2, 3, 4, 5, 6]
    assert max(held for _, _, held in broken.given) == 6
    assert back.loads[0] >= 7
    assert play.workers[1].loads == list(range(1, 41))
    saw("fenced, its groups run again on the other, replaced by one that loaded the newest weights first; 0 episodes labelled 7 by it")


@pytest.mark.row(5, "every engine fails in the middle of loading version 7")
def test_a_version_that_no_engine_holds_is_not_live(saw: Saw) -> None:
    play = Play([Mortal(name="a", fails_load=7), Mortal(name="b", fails_load=7)])
    ended_steps: list[int] = []

    def make() -> Mortal:
        ended_steps.append(len(play.observer.steps))
        return Mortal(name="successor")

    play.make = make
    play.check(play.run())
    assert ended_steps == [6, 6]  # step 7 ended only after an engine held its weights
    saw("step 7 ended when a replaced engine held version 7, not before")


@pytest.mark.faults
@pytest.mark.timeout(400)
@pytest.mark.row(5, "one of two real engines fails after loading half of version 3, on Ray")
def test_a_real_engine_that_loads_half_is_replaced(tmp_path: Path, saw: Saw) -> None:
    run_dir = tmp_path / "run"
    words = ("--async", "--num-steps", "14", "--num-engines", "2", "--record", "all", *SMALL)
    with disturbed(
        "--agent", str(ENVS / "calculator.py"), "--run-dir", str(run_dir), *words, faults="half_load=3", folder=tmp_path
    ) as process:
        output = ended(process, 300)
    run = succeeded(Run(process.returncode, output, run_dir))
    assert len(lines(tmp_path / "half_load.jsonl")) == 1
    last = run.metrics[-1]
    mismatch = max(row["mismatch/max"] or 0.0 for row in run.metrics)
    assert mismatch < 1e-3
    assert last["engine/restarts"] >= 1
    assert last["ledger/trained"] == 56
    assert max(row["staleness/max"] for row in run.metrics) <= 1
    saw(f"replaced, {last['engine/groups_run_again']:.0f} groups run again; log-probabilities differ from their label's by {mismatch:.1e}")
