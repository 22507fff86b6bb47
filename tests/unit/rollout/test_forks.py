"""Episodes that go on from a turn of another one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import EvalSampling, Group, GroupRequest, Status, derive_seed
from agentrl.env.plan import IsolationConfig
from agentrl.flow.ledger import Ledger
from agentrl.learner.batch import merge_turns
from agentrl.rollout.episode_plan import EpisodePlan, ForkSettings
from agentrl.rollout.worker import EpisodeWorker
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import CODEC, SETTINGS, TASK
from tests.unit.rollout.templates import tokenizer

pytestmark = pytest.mark.anyio

ENV = '''
import random
from agentrl import AgentInstance, ResetResult, StepResult

calls = []

class Env(AgentInstance):
    """Four turns; what it says next depends on its own random numbers and on every answer so far."""

    def reset(self, state):
        calls.append("reset")
        self.random, self.told = random.Random(state.seed), []
        return ResetResult("begin")

    def step(self, state):
        if state.label.get("fail") == state.turn:
            raise ValueError("the environment fails")
        self.told.append(state.action_text)
        number = self.random.randrange(10**6)
        over = state.turn == 3 or state.turn == state.label.get("last", 3)
        return StepResult(float(state.turn), f"{number} after {' '.join(self.told)}", terminated=over, info={"turns": 1.0})

    def snapshot(self):
        calls.append("snapshot")
        return self.random.getstate(), list(self.told)

    def restore(self, snapshot):
        calls.append("restore")
        self.random = random.Random()
        self.random.setstate(snapshot[0])
        self.told = snapshot[1]
'''


def answers(request: GenerationRequest) -> list[int]:
    """A text that depends on the seed of the turn, as a sample does."""
    return CODEC.encode_text(f"{request.sampling.seed or 0:x}"[:6] + "<|im_end|>")


@asynccontextmanager
async def running(
    folder: Path,
    engine: ScriptedEngine,
    text: str = ENV,
    isolation: Literal["none", "process"] = "none",
    **changes: Any,
) -> AsyncIterator[EpisodeWorker]:
    """A worker whose episodes are forked as `changes` say."""
    tokenizer("chatml").save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 512}')
    path = folder / "env.py"
    path.write_text(text)
    forks = ForkSettings(**{"at": 2, "branches": 2, **changes})
    model = replace(SETTINGS.model, model=str(folder / "model"))
    settings: EpisodePlan = replace(SETTINGS, model=model, forks=forks, isolation=IsolationConfig(env_isolation=isolation))
    worker = EpisodeWorker(engine, load_agent(str(path)), settings)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.close()


def calls_of(worker: EpisodeWorker) -> list[str]:
    return list(worker._agent.load().step.__globals__["calls"])


def asked(samples: int = 4, **label: int) -> GroupRequest:
    return GroupRequest(group_id=4, task=replace(TASK, label=label), n_samples_per_prompt=samples, version=0)


def sampled(group: Group, index: int) -> list[list[int]]:
    return [turn.token_ids.tolist() for turn in group.trajectories[index].turns]


def read(group: Group, index: int) -> list[list[int]]:
    return [turn.prompt_ids.tolist() for turn in group.trajectories[index].turns]


def engine() -> ScriptedEngine:
    return ScriptedEngine(answer=answers, max_model_len=4096)


async def test_the_turns_before_are_shared_and_those_after_are_its_own(tmp_path: Path) -> None:
    scripted = engine()
    async with running(tmp_path, scripted) as worker:
        summary, group = await worker.run_group(asked())
        assert calls_of(worker).count("reset") == 2
        assert calls_of(worker).count("snapshot") == calls_of(worker).count("restore") == 2
    assert [t.status for t in group.trajectories] == [Status.FINISHED] * 4
    assert [(t.forked_from, t.forked_turns) for t in group.trajectories] == [("", 0), ("4-0-0", 2), ("", 0), ("4-0-2", 2)]
    for root in (0, 2):
        one, other = sampled(group, root), sampled(group, root + 1)
        assert one[:2] == other[:2]
        assert one[2] != other[2]
        assert read(group, root)[:3] == read(group, root + 1)[:3]  # the same prompt, then another answer
        assert [turn.number for turn in group.trajectories[root + 1].turns] == [0, 1, 2, 3]
        assert group.trajectories[root + 1].reward == 6.0
        (row,) = merge_turns(group.trajectories[root + 1])
        assert len(row.tokens) == sum(map(len, [*read(group, root + 1), *other]))
    assert sampled(group, 0)[0] != sampled(group, 2)[0]
    assert len(scripted.requests) == 4 + 2 + 4 + 2
    assert (summary.num_forked, summary.num_trainable) == (2, 4)


async def test_the_environment_of_a_fork_answers_as_the_root_would(tmp_path: Path) -> None:
    """With the same answers, everything that follows is the same: random numbers, and what it remembers."""
    same = ScriptedEngine(answer=lambda request: CODEC.encode_text("go<|im_end|>"), max_model_len=4096)
    async with running(tmp_path, same, at=1, branches=4) as worker:
        _, group = await worker.run_group(asked())
    texts = {tuple(map(tuple, read(group, index))) for index in range(4)}
    assert len(texts) == 1
    assert "after go go go" in CODEC.decode(read(group, 3)[3])


async def test_a_fork_samples_with_the_seeds_of_its_own_place(tmp_path: Path) -> None:
    scripted = engine()
    async with running(tmp_path, scripted, at=1) as worker:
        await worker.run_group(asked(2))
    seeds = {request.request_id: request.sampling.seed for request in scripted.requests}
    assert sorted(seeds) == ["4-0-0-0", "4-0-0-1", "4-0-0-2", "4-0-0-3", "4-0-1-1", "4-0-1-2", "4-0-1-3"]
    seed = SETTINGS.seed
    assert seeds["4-0-1-2"] == derive_seed(seed, TASK.id, TASK.epoch, 1, 2)


async def test_the_same_group_again_gives_the_same_tokens(tmp_path: Path) -> None:
    groups = []
    for delay in (0.0, 0.01):
        scripted = ScriptedEngine(answer=answers, max_model_len=4096, delay=lambda request, s=delay: s * (len(request.request_id) % 3))  # type: ignore[misc]
        async with running(tmp_path, scripted) as worker:
            groups.append((await worker.run_group(asked(6)))[1])
    assert [sampled(groups[0], index) for index in range(6)] == [sampled(groups[1], index) for index in range(6)]


@pytest.mark.parametrize(("label", "statuses"), [({"last": 1}, [Status.FINISHED] * 4), ({"fail": 0}, [Status.ENV_ERROR] * 4)])
async def test_others_are_played_from_their_beginning_if_the_root_ends_before(
    tmp_path: Path, label: dict[str, int], statuses: list[Status]
) -> None:
    async with running(tmp_path, engine()) as worker:
        summary, group = await worker.run_group(asked(**label))
        assert calls_of(worker).count("reset") == 4
    assert [t.status for t in group.trajectories] == statuses
    assert summary.num_forked == 0
    assert all(t.forked_turns == 0 for t in group.trajectories)


async def test_a_failure_after_the_fork_is_that_of_each(tmp_path: Path) -> None:
    async with running(tmp_path, engine()) as worker:
        _, group = await worker.run_group(asked(2, fail=3))
    assert [t.status for t in group.trajectories] == [Status.ENV_ERROR] * 2
    assert [t.reward for t in group.trajectories] == [None, None]
    assert "the environment fails" in (group.trajectories[1].error or "")


async def test_a_state_that_cannot_be_taken_fails_the_root_by_name(tmp_path: Path) -> None:
    text = ENV.replace('        calls.append("snapshot")\n', '        raise TypeError("cannot pickle a socket")\n')
    async with running(tmp_path, engine(), text) as worker:
        _, group = await worker.run_group(asked(2))
    assert [t.status for t in group.trajectories] == [Status.ENV_ERROR, Status.FINISHED]
    assert "env.py: Env.snapshot raised TypeError: cannot pickle a socket" in (group.trajectories[0].error or "")


async def test_a_state_that_cannot_be_restored_fails_the_fork(tmp_path: Path) -> None:
    text = ENV.replace('        calls.append("restore")\n', '        raise RuntimeError("no room")\n')
    async with running(tmp_path, engine(), text) as worker:
        _, group = await worker.run_group(asked(2))
    assert [t.status for t in group.trajectories] == [Status.FINISHED, Status.ENV_ERROR]
    assert "Env.restore raised RuntimeError: no room" in (group.trajectories[1].error or "")


async def test_forks_begin_where_the_model_is_unsure(tmp_path: Path) -> None:
    """The engine gives the token t the log-probability -(t mod 7 + 1) / 8, so that tokens of 0 are sure and those of 6 are not."""
    sure, unsure = [7 * 30], [7 * 30 + 6]

    def answer(request: GenerationRequest) -> list[int]:
        turn = int(request.request_id.rsplit("-", 1)[1])
        return unsure * 4 if turn == 2 else sure * 4

    scripted = ScriptedEngine(answer=answer, max_model_len=4096)
    async with running(tmp_path, scripted, at="entropy", entropy=0.5) as worker:
        _, group = await worker.run_group(asked(2))
    assert [t.forked_turns for t in group.trajectories] == [0, 2]
    async with running(tmp_path, scripted, at="entropy", entropy=0.8) as worker:
        _, group = await worker.run_group(asked(2))
    assert [t.forked_turns for t in group.trajectories] == [0, 0]


async def test_measurements_and_the_greedy_episode_are_not_forked(tmp_path: Path) -> None:
    async with running(tmp_path, engine()) as worker:
        request = replace(asked(2), eval_sampling=EvalSampling(name="eval-0", seed=3))
        summary, _ = await worker.run_group(request)
        assert summary.num_forked == 0
        summary, group = await worker.run_group(replace(asked(2), greedy=True))
    assert (summary.num_forked, group.greedy[0].forked_turns) == (1, 0)


async def test_several_agents_are_forked_together(tmp_path: Path) -> None:
    text = ENV.replace("class Env(AgentInstance):", 'class Env(AgentInstance):\n    agents = ("one", "two")\n')
    async with running(tmp_path, engine(), text, at=3) as worker:
        _, group = await worker.run_group(asked(2))
    assert [(t.agent, t.forked_turns) for t in group.trajectories] == [("one", 0), ("two", 0), ("one", 3), ("two", 3)]
    assert [[turn.number for turn in t.turns] for t in group.trajectories] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert group.trajectories[2].turns[0] is group.trajectories[0].turns[0]
    assert sampled(group, 1)[1] != sampled(group, 3)[1]


async def test_a_run_that_is_closed_leaves_nobody_waiting(tmp_path: Path) -> None:
    slow = ScriptedEngine(answer=answers, max_model_len=4096, delay=lambda request: 60.0)
    async with running(tmp_path, slow) as worker:
        group = asyncio.create_task(worker.run_group(asked()))
        await asyncio.sleep(0.1)
    _, played = await asyncio.wait_for(group, 5)
    assert [t.status for t in played.trajectories] == [Status.CANCELLED] * 4


async def test_an_isolated_environment_is_forked_without_methods_of_its_own(tmp_path: Path) -> None:
    """Its process is copied: what it answers is what the methods of the same environment would have made of it."""
    methods = ENV[ENV.index("    def snapshot") :]
    played = []
    isolations: tuple[Literal["none", "process"], ...] = ("none", "process")
    for text, isolation in zip((ENV, ENV.replace(methods, "")), isolations, strict=True):
        async with running(tmp_path, engine(), text, isolation) as worker:
            summary, group = await worker.run_group(asked())
        assert (summary.num_forked, [t.status for t in group.trajectories]) == (2, [Status.FINISHED] * 4)
        played.append([(sampled(group, index), read(group, index)) for index in range(4)])
    assert played[0] == played[1]


async def test_records_name_the_root(tmp_path: Path) -> None:
    async with running(tmp_path, engine()) as worker:
        summary, _ = await worker.run_group(replace(asked(2), record=2))
    assert [(record.get("forked_from"), record.get("forked_turns")) for record in summary.records] == [(None, None), ("4-0-0", 2)]


async def test_the_ledger_counts_forks_of_trained_groups_over_resumptions() -> None:
    ledger = Ledger()
    ledger.restore(trained=3, filtered={}, dropped={}, forked=5)
    ledger.submit(7)
    ledger.train([7], forked=2)
    counts = ledger.check()
    assert (counts.forked, counts.metrics()["ledger/forked"]) == (7, 7)
    assert "ledger/forked" not in Ledger().check().metrics()
