"""A black-box agent trains on real vLLM and DeepSpeed through each API and SDK: many episodes at once, two turns with a tool."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.protocols import GenerationRequest
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import Generation, GroupRequest
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transformers_engine import TransformersEngine
from agentrl.engine.vllm_engine import VllmEngine
from agentrl.learner.batch import collate
from agentrl.resolve.parts import engine_plan, episode_plan
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.observers import WatchedEngine
from agentrl.rollout.worker import EpisodeWorker
from agentrl.suites.load import load_agent
from tests.e2e.runs import succeeded, train
from tests.e2e.tool_agent import FORMS, Asks, model_with_tools

FORM = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
FILE = Path(__file__).with_name("tool_agent.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with_tools(tmp_path_factory.mktemp("model") / "tools")


@FORM
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_two_turn_agent_on_an_sdk_learns(form: type[Asks], model: Path, tmp_path: Path) -> None:
    sizes = ("--runtime", "local", "--groups-per-step", "8", "--n-samples-per-prompt", "8", "--max-new-tokens", "32", "--record", "all")
    words = ("--model", str(model), "--num-steps", "16", "--seed", "3", *sizes, "--no-save-model")
    run = succeeded(train(tmp_path / "run", *words, agent=f"{FILE}:{form.__name__}", timeout_s=350))
    rewards = [row["reward/mean"] for row in run.metrics]
    assert sum(rewards[-3:]) / 3 >= sum(rewards[:3]) / 3 + 0.2, [round(reward, 2) for reward in rewards]
    for row in run.metrics:
        assert row["mismatch/kl"] < 1e-6
        assert row["endpoint/branches"] == 1.0  # one tree per episode
        assert row["endpoint/delivered"] == 1.0
        assert row["endpoint/refused"] == row["endpoint/retries"] == 0.0
        assert row["endpoint/requests"] == row["episode/turns_mean"]
    records = [json.loads(line) for line in (run.directory / "trajectories.jsonl").read_text().splitlines()]
    assert len(records) >= 64 * 16
    for record in records:  # each episode reads its own question only
        first, *later = record["turns"]
        assert first["prompt_text"].count("=?") == 1
        assert record["task"]["prompt"] in first["prompt_text"]
        assert all("=?" not in turn["prompt_text"] for turn in later)


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.timeout(300)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("kind", [TransformersEngine, VllmEngine], ids=["transformers", "vllm"])
async def test_streams_record_exactly_what_is_recorded_without_them(kind: Any, model: Path) -> None:
    config = changed(TrainConfig(), model=str(model), max_new_tokens=32, max_model_len=512, kv_cache_gib=0.1)
    engine = kind(engine_plan(config, "cpu"))
    told: list[int] = []
    generate = engine.generate

    async def heard(request: GenerationRequest) -> Generation:
        if request.on_tokens is not None:
            listener = request.on_tokens
            request = replace(request, on_tokens=lambda new: (told.append(len(new)), listener(new)))
        return await generate(request)

    engine.generate = heard
    played: dict[str, list[Any]] = {}
    await engine.start()
    for form in FORMS:
        worker = EpisodeWorker(Unclosed(engine), load_agent(f"{FILE}:{form.__name__}"), episode_plan(config).with_model(str(model)))
        await worker.start()
        tasks = list(form.tasks())[:2]
        told.clear()
        asked = [GroupRequest(group_id=number, task=task, n_samples_per_prompt=4, version=0) for number, task in enumerate(tasks)]
        groups = [group for _, group in await asyncio.gather(*map(worker.run_group, asked))]
        await worker.close()
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        assert [trajectory.error for trajectory in trajectories] == [None] * 8
        assert bool(told) == form.streamed
        played[form.__name__] = [
            (turn.prompt_ids.tolist(), turn.token_ids.tolist(), bits(turn.logprobs)) for each in trajectories for turn in each.turns
        ]
    await engine.close()
    for form in FORMS:
        assert played[form.__name__] == played[form.__name__.removesuffix("Streamed")]


class Unclosed(WatchedEngine):
    """An engine that several workers use one after another."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine, lambda event: None, lambda request: asyncio.sleep(0))

    async def close(self) -> None:
        """The test closes it."""


class Kept(VllmEngine):
    """Keeps what it was asked and what it sampled."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.kept: dict[str, Generation] = {}
        self.prompts: dict[str, list[int]] = {}

    async def generate(self, request: GenerationRequest) -> Generation:
        self.prompts[request.request_id] = request.prompt_ids.tolist()
        self.kept[request.request_id] = await super().generate(request)
        return self.kept[request.request_id]


def bits(values: Any) -> list[int]:
    return np.asarray(values, dtype=np.float32).view(np.uint32).tolist()


@FORM
@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.timeout(300)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_64_episodes_at_once_keep_apart_and_have_the_bits_of_the_engine(
    form: type[Asks], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = changed(TrainConfig(), model=str(model), max_new_tokens=32, max_model_len=512, kv_cache_gib=0.1)
    engine = Kept(engine_plan(config, "cpu"))
    agent = load_agent(f"{FILE}:{form.__name__}")
    monkeypatch.setattr(agent.load(), "together", asyncio.Barrier(64))
    worker = EpisodeWorker(engine, agent, episode_plan(config).with_model(str(model)))
    tasks = list(form.tasks())[::5][:8]
    await worker.start()
    try:
        group_requests = [GroupRequest(group_id=number, task=task, n_samples_per_prompt=8, version=0) for number, task in enumerate(tasks)]
        groups = [group for _, group in await asyncio.gather(*map(worker.run_group, group_requests))]
    finally:
        await worker.close()
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    turns = [(f"{trajectory.episode_id}-{turn.number}", turn) for trajectory in trajectories for turn in trajectory.turns]
    assert [trajectory.error for trajectory in trajectories] == [None] * 64
    assert len(turns) == len(engine.kept) > 64
    for name, turn in turns:
        assert turn.token_ids.tolist() == engine.kept[name].token_ids.tolist()
        assert bits(turn.logprobs) == bits(engine.kept[name].logprobs)
        assert turn.versions.tolist() == engine.kept[name].versions.tolist()
    codec = ChatCodec(load_tokenizer(str(model)))
    for task, group in zip(tasks, groups, strict=True):
        for trajectory in group.trajectories:
            first, *later = (engine.prompts[f"{trajectory.episode_id}-{turn.number}"] for turn in trajectory.turns)
            assert f"<|user|>{task.prompt}<|end|>" in codec.decode(first)
            for prompt in later:
                assert prompt[: len(first)] == first
                assert codec.decode(prompt).count("=?") == 1
    batch = collate(groups)
    assert batch.num_rows == batch.num_episodes == 64  # a conversation is one row, whatever its dialect
    sampled = [value for generation in engine.kept.values() for value in bits(generation.logprobs)]
    assert sorted(bits(batch.logprobs.numpy())) == sorted(sampled)  # every token that is trained was sampled, once
