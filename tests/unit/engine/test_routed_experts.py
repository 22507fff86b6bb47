"""Engines report the experts that each token went through, and a learner that takes them again is closer to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.core.errors import EngineError
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import Generation, Group, Sampling, Status, Task, Trajectory, Turn, ints
from agentrl.engine.plan import EngineConfig
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transformers_engine import TransformersEngine
from agentrl.learner.learner import LearnerRank
from agentrl.rollout.plan import ModelConfig
from agentrl.weights.sender import SharedMemorySender
from tests.learner_support import CollectingSender, make_settings, write_experts

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_experts(tmp_path_factory.mktemp("experts"), num_hidden_layers=3, mlp_only_layers=[1], num_experts=8)


def settings(model: str, dtype: str = "float32") -> EngineSettings:
    engine = EngineConfig(engine_dtype=dtype, max_num_seqs=4, kv_cache_gib=0.01)  # type: ignore[arg-type]
    return EngineSettings(model=ModelConfig(model=model), engine=engine, routed_experts=True)


@pytest.fixture(scope="module")
async def engine(model: str) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(settings(model))
    await engine.start()
    yield engine
    await engine.close()


def asked(name: str, ids: list[int], tokens: int = 12, session: str = "") -> GenerationRequest:
    sampling = Sampling(max_tokens=tokens, seed=len(ids), temperature=1.0)
    return GenerationRequest(request_id=name, prompt_ids=ints(ids), sampling=sampling, session=session)


def routed(model: str, ids: list[int]) -> np.ndarray[Any, Any]:
    """Experts that transformers itself chooses: the best by the router's logits, best first. # [tokens, layers, 2]."""
    from transformers import AutoModelForCausalLM

    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        first, last = plain(input_ids=torch.tensor([ids]), output_router_logits=True).router_logits
    chosen = np.zeros((len(ids), 3, 2), dtype=np.int64)
    chosen[:, 0], chosen[:, 2] = (logits.topk(2).indices.numpy() for logits in (first, last))
    return chosen


async def test_experts_are_those_that_transformers_chooses(engine: TransformersEngine, model: str) -> None:
    ids = list(range(5, 25))
    for turn in range(3):  # of a conversation: later turns find the keys and values of earlier ones, and others share the prompt
        answer = await engine.generate(asked(f"turn {turn}", ids, session="a"))
        again = await engine.generate(asked(f"again {turn}", ids, session="b"))
        whole = [*ids, *answer.token_ids.tolist()]
        assert answer.experts is not None
        assert answer.experts.dtype == np.uint8
        assert not answer.experts.flags.writeable
        np.testing.assert_array_equal(answer.experts, routed(model, whole)[:-1])
        np.testing.assert_array_equal(again.experts, answer.experts)
        assert again.cached_tokens == len(ids)
        ids = [*whole, 7, 8, 9]
    assert answer.cached_tokens > 30


async def test_tokens_keep_the_experts_of_the_weights_that_sampled_them(model: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from agentrl.learner.export import checkpoint_names
    from agentrl.learner.parameters import WHOLE

    own, changed = TransformersEngine(settings(model)), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    changed.save_pretrained(tmp_path / "changed")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "changed")
    (tmp_path / "shm").mkdir()
    sender = SharedMemorySender(tmp_path / "shm")
    await own.start()
    try:
        ids = list(range(5, 25))
        generating = asyncio.create_task(own.generate(asked("long", ids, 200)))
        while not own.stats().load.running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await own.load_weights(sender.send(checkpoint_names(changed, WHOLE.named(changed)), 1))
        answer = await generating
        after = await own.generate(asked("after", ids))
    finally:
        sender.close()
        await own.close()
    assert set(answer.versions.tolist()) == {0, 1}
    old = len(ids) + int((answer.versions == 0).sum()) - 1
    whole = [*ids, *answer.token_ids.tolist()]
    expected = np.concatenate([routed(model, whole)[:old], routed(str(tmp_path / "changed"), whole)[old:-1]])
    assert (np.asarray(answer.experts) == expected).mean() > 0.999
    np.testing.assert_array_equal(after.experts, routed(str(tmp_path / "changed"), [*ids, *after.token_ids.tolist()])[:-1])


async def test_an_engine_that_is_not_asked_reports_none(model: str) -> None:
    quiet = TransformersEngine(replace(settings(model), routed_experts=False))
    await quiet.start()
    try:
        assert (await quiet.generate(asked("quiet", [5, 6, 7]))).experts is None
    finally:
        await quiet.close()


def group(number: int, prompt: list[int], generations: list[Generation]) -> Group:
    trajectories = tuple(
        Trajectory(
            trajectory_id=f"{number}-{member}",
            episode_id=f"{number}-{member}",
            group_id=number,
            turns=(
                Turn(
                    prompt_ids=ints(prompt),
                    token_ids=generation.token_ids,
                    logprobs=generation.logprobs,
                    versions=generation.versions,
                    finish_reason=generation.finish_reason,
                    experts=generation.experts,
                ),
            ),
            status=Status.FINISHED,
            reward=float(member),
        )
        for member, generation in enumerate(generations)
    )
    return Group(group_id=number, task=Task("x"), trajectories=trajectories)


async def test_replay_brings_the_learner_closer_to_an_engine_that_rounds(model: str) -> None:
    """The engine computes in bfloat16, the learner in float32, so that some tokens of it would go to other experts."""
    engine = TransformersEngine(settings(model, "bfloat16"))
    await engine.start()
    groups = []
    try:
        for number in range(8):
            prompt = np.random.default_rng(number).integers(2, 64, 30).tolist()
            answer = await engine.generate(asked(str(number), prompt, 60))
            groups.append(group(number, prompt, [answer, answer]))
    finally:
        await engine.close()
    found: dict[bool, dict[str, float]] = {}
    for replay in (False, True):
        learner = LearnerRank(make_settings(model, algo={"router_replay": replay}), CollectingSender())
        learner.start(0, 1, 0)
        found[replay] = dict(learner.train(0, *groups).metrics)
        learner.close()
    assert found[True]["router_replay/share"] == 1.0
    assert found[True]["router_replay/agreement"] < 1.0
    assert found[True]["mismatch/kl"] < 0.5 * found[False]["mismatch/kl"]
    assert found[True]["mismatch/mean"] < 0.8 * found[False]["mismatch/mean"]


def test_vllms_record_is_taken_if_it_is_whole() -> None:
    from agentrl.engine.vllm_engine import _experts

    rows = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)
    found = _experts(rows, 5)
    assert found is not None
    np.testing.assert_array_equal(found, rows)
    assert _experts(rows, 6) is None
    assert _experts(None, 5) is None


@pytest.mark.slow
async def test_vllm_on_a_cpu_cannot_report_experts(model: str) -> None:
    """If this fails, vLLM has learned to, and `_experts_can_be_replayed` may allow it."""
    from agentrl.engine.vllm_engine import VllmEngine

    with pytest.raises(EngineError, match="Model Runner V2"):
        await VllmEngine(settings(model)).start()
