"""Groups and the worker that runs them."""

import asyncio
import gc
import json
import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl import Task
from agentrl.cluster.plan import RunConfig
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError, EngineError, WeightSyncError
from agentrl.core.protocols import RolloutWorker, WeightUpdate
from agentrl.core.types import EvalSampling, GroupRequest, Status
from agentrl.env.plan import DataConfig
from agentrl.flow.ledger import failure_reason
from agentrl.resolve.parts import episode_plan
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.endpoint.answers import JsonAnswerParser
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.plan import EndpointConfig, RolloutConfig, SamplingConfig
from agentrl.rollout.tasks import check_prompts, context_length
from agentrl.rollout.worker import EpisodeWorker
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import SETTINGS, TASK, says
from tests.unit.rollout.templates import tokenizer

pytestmark = pytest.mark.anyio

ENV = """
import asyncio, itertools
from agentrl import AgentInstance, StepResult
made = itertools.count()
log = []

class Env(AgentInstance):
    def __init__(self):
        self.number = next(made)

    async def step(self, state):
        kind = state.label[self.number % len(state.label)]
        if kind == "raise":
            raise ValueError("member fails")
        if kind == "hang":
            await asyncio.sleep(60)
        return StepResult(float(kind), terminated=True)

    async def close(self):
        log.append(self.number)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    tokenizer("chatml").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 512}')
    return str(tmp_path / "model")


def worker_of(folder: Path, model: str, engine: ScriptedEngine) -> EpisodeWorker:
    path = folder / "env.py"
    path.write_text(ENV)
    return EpisodeWorker(engine, load_agent(str(path)), changed(SETTINGS, model=model))


def group_request(*label: str, record: int = 0) -> GroupRequest:
    return GroupRequest(group_id=4, task=replace(TASK, label=label), n_samples_per_prompt=len(label), version=2, record=record)


async def test_one_failing_member_disturbs_no_other(tmp_path: Path, model: str) -> None:
    worker: RolloutWorker = worker_of(tmp_path, model, ScriptedEngine(answer=says("three")))
    await worker.start()
    summary, group = await worker.run_group(group_request("1", "raise", "0.5", "hang"))
    assert [member.status for member in summary.members] == [Status.FINISHED, Status.ENV_ERROR, Status.FINISHED, Status.TIMEOUT]
    assert [member.reward for member in summary.members] == [1.0, None, 0.5, None]
    assert summary.group_id == group.group_id == 4
    assert [trajectory.trajectory_id for trajectory in group.trajectories] == ["4-0-0", "4-0-1", "4-0-2", "4-0-3"]
    assert summary.versions == (0, 0)
    await worker.close()


async def test_ended_episodes_leave_nothing_to_the_garbage_collector(tmp_path: Path, model: str) -> None:
    worker = worker_of(tmp_path, model, ScriptedEngine(answer=says("three")))
    await worker.start()
    await worker.run_group(group_request("1", "0"))
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await worker.run_group(group_request("1", "0"))
        gc.collect()
        left = {type(found).__name__ for found in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        await worker.close()
    assert not left & {"Episode", "EnvSession", "UserTask", "Conversation", "Recorder", "Trajectory", "Env"}


async def test_members_run_side_by_side(tmp_path: Path, model: str) -> None:
    worker = worker_of(tmp_path, model, ScriptedEngine(answer=says("three"), delay=lambda request: 0.3))
    await worker.start()
    start = time.monotonic()
    await worker.run_group(group_request(*["1"] * 10))
    assert time.monotonic() - start < 1.5
    await worker.close()


async def test_records_hold_what_replay_needs(tmp_path: Path, model: str) -> None:
    worker = worker_of(tmp_path, model, ScriptedEngine(answer=says("three"), version=2))
    await worker.start()
    summary, group = await worker.run_group(group_request("1", "raise", record=2))
    first, second = json.loads(json.dumps(summary.records))
    turn = group.trajectories[0].turns[0]
    assert first["turns"][0]["prompt_ids"] == turn.prompt_ids.tolist()
    assert first["turns"][0]["token_ids"] == turn.token_ids.tolist()
    assert first["turns"][0]["versions"] == [2] * len(turn.token_ids)
    assert first["turns"][0]["text"] == "three<|im_end|>"
    assert (first["reward"], first["status"], first["version"]) == (1.0, "finished", 2)
    assert first["task"]["label"] == ["1", "raise"]
    assert second["status"] == "env_error"
    assert "member fails" in second["error"]
    await worker.close()


async def test_a_trial_has_numbers_and_names_of_its_own(tmp_path: Path, model: str) -> None:
    engine = ScriptedEngine(answer=says("three"))
    worker = worker_of(tmp_path, model, engine)
    await worker.start()
    trained = group_request("1", "1", record=1)
    eval_sampling = replace(trained, eval_sampling=EvalSampling(name="eval-2", seed=99, temperature=0.0))
    (first, _), (second, _) = await worker.run_group(trained), await worker.run_group(eval_sampling)
    assert [summary.records[0]["trajectory_id"] for summary in (first, second)] == ["4-0-0", "eval-2-4-0-0"]
    assert [request.sampling.temperature for request in engine.requests] == [1.0, 1.0, 0.0, 0.0]
    assert len({request.sampling.seed for request in engine.requests}) == 4
    assert len({request.request_id for request in engine.requests}) == 4
    await worker.close()


async def test_a_greedy_episode_runs_beside_the_members_and_is_none_of_them(tmp_path: Path, model: str) -> None:
    engine = ScriptedEngine(answer=says("three"))
    worker = worker_of(tmp_path, model, engine)
    await worker.start()
    asked = replace(group_request("1", "0.5", "0.25"), n_samples_per_prompt=2, greedy=True)
    summary, group = await worker.run_group(asked)
    assert sorted(request.sampling.temperature for request in engine.requests) == [0.0, 1.0, 1.0]
    assert [trajectory.trajectory_id for trajectory in (*group.trajectories, *group.greedy)] == ["4-0-0", "4-0-1", "4-0-2"]
    assert ([m.reward for m in summary.members], [m.reward for m in summary.greedy]) == ([1.0, 0.5], [0.25])
    assert (summary.num_trainable, len(summary.episodes)) == (2, 2)
    assert worker._throttle.live == 0
    failed, _ = await worker.run_group(replace(asked, task=replace(TASK, label=("1", "0.5", "raise"))))
    assert [m.status for m in (*failed.members, *failed.greedy)] == [Status.FINISHED, Status.FINISHED, Status.ENV_ERROR]
    assert (failed.num_trainable, failure_reason(failed)) == (0, "env_error")
    await worker.close()


async def test_closing_cancels_what_runs_and_closes_every_environment(tmp_path: Path, model: str) -> None:
    worker = worker_of(tmp_path, model, ScriptedEngine(delay=lambda request: 60.0))
    await worker.start()
    running = asyncio.create_task(worker.run_group(group_request("1", "1")))
    await asyncio.sleep(0.1)
    before = asyncio.all_tasks() - {running}
    await worker.close()
    summary, _ = await running
    assert [member.status for member in summary.members] == [Status.CANCELLED] * 2
    assert len(worker._agent.load().close.__globals__["log"]) == 2
    assert {task for task in asyncio.all_tasks() if task in before and "episode" in task.get_name()} == set()
    with pytest.raises(EngineError, match="not running"):
        await worker.run_group(group_request("1"))
    await worker.close()


async def test_cancelling_a_group_ends_its_members(tmp_path: Path, model: str) -> None:
    worker = worker_of(tmp_path, model, ScriptedEngine(delay=lambda request: 60.0))
    await worker.start()
    tasks = asyncio.all_tasks()
    running = asyncio.create_task(worker.run_group(group_request("1", "1")))
    await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert asyncio.all_tasks() == tasks
    await worker.close()


async def test_a_bug_in_one_member_ends_the_group_at_once(tmp_path: Path, model: str) -> None:
    def answer(request: Any) -> Any:
        return KeyError("bug") if request.session.endswith("-1") else [2]

    worker = worker_of(tmp_path, model, ScriptedEngine(answer=answer, delay=lambda r: 0.0 if r.session.endswith("-1") else 60.0))
    await worker.start()
    with pytest.raises(KeyError):
        await asyncio.wait_for(worker.run_group(group_request("1", "1", "1")), 5)
    await worker.close()


async def test_weights_and_counters_are_passed_on(tmp_path: Path, model: str) -> None:
    engine = ScriptedEngine(answer=says("three"))
    worker = worker_of(tmp_path, model, engine)
    await worker.start()
    assert await worker.load_weights(WeightUpdate(version=1, transport="shm")) == 1
    summary, _ = await worker.run_group(group_request("1"))
    assert summary.versions == (1, 1)
    assert (await worker.stats()).tokens == summary.members[0].num_tokens > 0
    engine.reported = lambda version: version - 1
    with pytest.raises(WeightSyncError):
        await worker.load_weights(WeightUpdate(version=2, transport="shm"))
    await worker.close()


async def test_the_parser_of_the_models_own_calls_is_fitted_at_the_start_and_told(tmp_path: Path, model: str) -> None:
    fitted = list[str]()

    def fit(codec: ChatCodec, config: EndpointConfig) -> str:
        codec.use_parser(JsonAnswerParser(), "own", template_tools=True)
        fitted.append(config.tool_parser)
        return ""

    plain = worker_of(tmp_path, model, ScriptedEngine())
    own = EpisodeWorker(ScriptedEngine(), load_agent(str(tmp_path / "env.py")), changed(SETTINGS, model=model), fit)
    for worker, name in ((plain, ""), (own, "own")):
        assert (await worker.stats()).tool_parser == ""
        await worker.start()
        assert (await worker.stats()).tool_parser == name
        await worker.close()
    assert fitted == ["auto"]


def test_settings_come_from_the_configuration_and_survive_pickling() -> None:
    config = TrainConfig(
        run=RunConfig(seed=3),
        sampling=SamplingConfig(temperature=0.7),
        rollout=RolloutConfig(max_new_tokens=9, stop=("x",), env_threads=2),
        data=DataConfig(apply_chat_template=False, system_prompt="s"),
    )
    settings = episode_plan(config)
    assert (settings.seed, settings.sampling.temperature, settings.sampling.max_tokens, settings.sampling.stop) == (3, 0.7, 9, ("x",))
    assert (settings.env.threads, settings.data.apply_chat_template, settings.data.system_prompt) == (2, False, "s")
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_prompts_are_measured_before_an_engine_starts(model: str) -> None:
    settings = changed(EpisodePlan(), model=model)
    check_prompts(settings, [TASK, Task("word " * 60)], context_length(model))
    with pytest.raises(ConfigError) as caught:
        check_prompts(settings, [TASK, Task("x" * 3000, id="long")], context_length(model))
    assert caught.value.field == "--max-model-len"
    assert "'long'" in caught.value.problem
    with pytest.raises(ConfigError) as caught:
        check_prompts(changed(settings, max_episode_tokens=10), [TASK], 512)
    assert caught.value.field == "--max-episode-tokens"
    check_prompts(settings, [Task("x" * 3000)], 0)


def test_short_prompts_need_no_tokenizer(tmp_path: Path) -> None:
    check_prompts(changed(EpisodePlan(), model=str(tmp_path / "missing")), [TASK], 512)
    assert context_length(str(tmp_path / "missing")) == 0
