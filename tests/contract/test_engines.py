"""What every engine does, whatever samples: tokens, log-probabilities, versions, limits, failures; all tests run with each engine."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from agentrl.assets import tiny_model_path
from agentrl.core.errors import ContextLengthError, EngineDeadError, EngineError
from agentrl.core.protocols import Engine, SleepingEngine, WeightUpdate
from agentrl.core.types import FinishReason, Generation
from agentrl.engine.plan import EngineConfig
from agentrl.engine.shared import EngineHost, SharedEngine
from agentrl.testing import engines as contract
from agentrl.weights.plan import WeightsConfig
from agentrl.weights.sender import SharedMemorySender
from tests.e2e.vllm_support import CONTEXT, END, equal, expect_fence, prompt, random_llama, reference, request, saved, settings

pytestmark = pytest.mark.anyio
CORES: dict[str, Literal["thread", "process"]] = {"vllm": "thread", "process": "process"}
"""Kinds of engine that are vLLM, and the place of its core."""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=["vllm", pytest.param("process", marks=pytest.mark.slow), "transformers", "shared"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Alone(SharedEngine):
    """The only client of an engine, which ends with it."""

    def __init__(self, engine: Engine) -> None:
        self._host = EngineHost(engine)
        super().__init__(self._host, "worker-0")

    async def close(self) -> None:
        await super().close()
        await self._host.close()


def made(kind: str, model: str, **changes: Any) -> Engine:
    if (core := CORES.get(kind)) is not None:
        from agentrl.engine.vllm_engine import VllmEngine

        asked = settings(model, **changes)
        return VllmEngine(replace(asked, engine=replace(asked.engine, engine_core=core)))
    from agentrl.engine.transformers_engine import TransformersEngine

    engine = TransformersEngine(settings(model, **changes))
    if kind == "transformers":
        return engine
    return Alone(engine)


@pytest.fixture(scope="module")
def model() -> Any:
    return random_llama()


@pytest.fixture(scope="module")
async def engine(kind: str, model: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    engine = made(kind, saved(model, tmp_path_factory.mktemp("model")))
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
async def own(kind: str, tmp_path: Path) -> AsyncIterator[Engine]:
    """An engine that a test may spoil."""
    engine = made(kind, saved(random_llama(seed=0), tmp_path / "model"))
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[SharedMemorySender]:
    (tmp_path / "shm").mkdir()
    sender = SharedMemorySender(tmp_path / "shm")
    yield sender
    sender.close()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
async def test_logprobs_are_those_of_the_tempered_distribution(engine: Engine, model: Any, temperature: float) -> None:
    for index in range(4):
        generation = await engine.generate(request(prompt(index), max_tokens=24, temperature=temperature, seed=index))
        expected = reference(model, prompt(index), generation, temperature)
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)
        assert set(generation.versions.tolist()) == {0}


async def test_an_aborted_request_returns_what_was_sampled_so_far(engine: Engine, model: Any) -> None:
    asked = request(prompt(3), max_tokens=CONTEXT - 100, temperature=1.0, seed=5)
    generation = await contract.aborted_requests_return(engine, asked)
    assert generation.finish_reason is FinishReason.ABORTED
    assert 0 < len(generation.token_ids) < asked.sampling.max_tokens
    np.testing.assert_allclose(generation.logprobs, reference(model, prompt(3), generation, 1.0), atol=1e-4)
    whole = await engine.generate(request(prompt(3), max_tokens=len(generation.token_ids), temperature=1.0, seed=5))
    assert whole.token_ids.tolist() == generation.token_ids.tolist()


async def test_the_end_token_ends_a_turn_and_is_kept(kind: str, tmp_path: Path) -> None:
    engine = made(kind, saved(random_llama(end=END), tmp_path))
    await engine.start()
    try:
        assert engine.end_token_ids == (END,)
        asked = [request(prompt(1, 20), max_tokens=200, temperature=2.0, seed=seed) for seed in range(20)]
        ended = await asyncio.gather(*map(engine.generate, asked))
    finally:
        await engine.close()
    stopped = [g for g in ended if g.finish_reason is FinishReason.STOP]
    assert stopped
    assert all(g.token_ids[-1] == END and END not in g.token_ids[:-1] for g in stopped)
    assert all(END not in g.token_ids for g in ended if g.finish_reason is FinishReason.LENGTH)


async def test_answers_are_whole(engine: Engine) -> None:
    await contract.answers_are_whole(engine)


async def test_stop_tokens_end_a_turn_and_are_kept(engine: Engine) -> None:
    free, cut = await contract.stop_tokens_end_a_turn(engine)
    assert (free.finish_reason, len(free.token_ids)) == (FinishReason.LENGTH, 20)
    assert len(cut.token_ids) < 20


async def test_the_seed_decides(engine: Engine) -> None:
    await contract.the_seed_decides(engine)
    one, again, other = [await engine.generate(request(prompt(5), max_tokens=30, seed=seed)) for seed in (1, 1, 2)]
    assert equal(one, again)
    assert not np.array_equal(one.token_ids, other.token_ids)


async def test_tokens_are_told_as_they_are_sampled_and_the_answer_is_the_same(engine: Engine) -> None:
    assert await contract.telling_tokens_changes_nothing(engine) > 6
    plain = await asyncio.gather(*(engine.generate(request(prompt(k), max_tokens=24, seed=k)) for k in range(12)))
    told: list[list[int]] = [[] for _ in plain]
    asked = [replace(request(prompt(k), max_tokens=24, seed=k), on_tokens=tokens.extend) for k, tokens in enumerate(told)]
    heard = await asyncio.gather(*map(engine.generate, asked))
    assert all(equal(one, other) for one, other in zip(plain, heard, strict=True))
    assert told == [generation.token_ids.tolist() for generation in heard]


async def test_the_context_is_used_to_its_last_token_and_not_beyond(engine: Engine) -> None:
    assert engine.max_model_len == CONTEXT
    await contract.the_context_is_bounded(engine)
    with pytest.raises(ContextLengthError, match=str(CONTEXT)):
        await engine.generate(request(prompt(3, CONTEXT), max_tokens=50))


async def test_a_bad_request_fails_alone(engine: Engine) -> None:
    await contract.bad_requests_fail_alone(engine, request([5, 256]), request([5], stop=("x",)))


async def test_cancelling_drops_the_request_from_the_engine(engine: Engine) -> None:
    answers = await contract.cancelled_requests_are_dropped(engine)
    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers)


async def test_more_prompt_tokens_than_one_step_takes(engine: Engine) -> None:
    results = await asyncio.gather(*(engine.generate(request(prompt(i, 200), max_tokens=3, seed=i)) for i in range(40)))
    assert all(len(result.token_ids) for result in results)


async def test_usage_is_counted(kind: str, engine: Engine) -> None:
    first, second = await contract.usage_is_counted(engine)
    assert (first.cached_tokens, second.cached_tokens) == (0, 128 if kind in CORES else 140)


async def test_a_request_does_not_notice_its_neighbours(kind: str, tmp_path: Path) -> None:
    """Layers of 2048 inputs are where oneDNN treats a single row differently."""
    engine = made(kind, saved(random_llama(intermediate=2048), tmp_path))
    await engine.start()
    try:
        alone = [await engine.generate(request(prompt(k), max_tokens=24, seed=k)) for k in range(12)]
        for others in (1, 7, 63):
            order = list(range(others + 1))
            random.Random(others).shuffle(order)

            async def late(k: int) -> Any:
                await asyncio.sleep(random.Random(k).random() * 0.03)
                return await engine.generate(request(prompt(k), max_tokens=24, seed=k))

            together = dict(zip(order, await asyncio.gather(*map(late, order)), strict=True))
            assert all(equal(alone[k], together[k]) for k in range(min(12, others + 1))), f"among {others} others"
    finally:
        await engine.close()


async def test_stop_strings_end_a_turn_and_stay_in_it(kind: str) -> None:
    from transformers import AutoTokenizer

    path = str(tiny_model_path())
    tokenizer = AutoTokenizer.from_pretrained(path)
    engine = made(kind, path, stop_strings=True)
    await engine.start()
    try:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "12+5"}], add_generation_prompt=True, return_dict=False)
        for seed in range(20):
            free = await engine.generate(request(ids, max_tokens=30, temperature=2.0, seed=seed))
            stop = tokenizer.decode(free.token_ids[:1])[1:]
            if stop.isalpha():  # the end of a token of several letters
                break
        cut = await engine.generate(request(ids, max_tokens=30, temperature=2.0, seed=seed, stop=(stop,)))
        assert cut.finish_reason is FinishReason.STOP
        assert cut.token_ids.tolist() == free.token_ids[:1].tolist() != free.token_ids.tolist()
        assert cut.logprobs.tolist() == free.logprobs[:1].tolist()
        assert len(cut.versions) == 1
    finally:
        await engine.close()


async def test_a_model_that_is_not_there_is_named(kind: str, tmp_path: Path) -> None:
    engine = made(kind, str(tmp_path / "nothing"))
    with pytest.raises(EngineError, match="nothing"):
        await engine.start()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("intermediate", [128, 2048])
async def test_after_a_publication_samples_follow_the_new_weights(
    kind: str, tmp_path: Path, sender: SharedMemorySender, tied: bool, intermediate: int
) -> None:
    engine = made(kind, saved(random_llama(tied=tied, intermediate=intermediate), tmp_path / "model"))
    await engine.start()
    try:
        for version in (1, 2, 3):
            model = random_llama(seed=version, tied=tied, intermediate=intermediate)
            assert await engine.load_weights(sender.send(model.named_parameters(), version)) == version
            for index in range(3):
                generation = await engine.generate(request(prompt(index, 140), max_tokens=16, seed=index))
                np.testing.assert_allclose(generation.logprobs, reference(model, prompt(index, 140), generation), atol=1e-4)
                assert set(generation.versions.tolist()) == {version}
    finally:
        await engine.close()


async def test_requests_in_flight_go_on_with_the_new_weights(own: Engine, sender: SharedMemorySender) -> None:
    old, new = random_llama(seed=0), random_llama(seed=1)
    running = [asyncio.create_task(own.generate(request(prompt(i, 20), max_tokens=230, seed=i))) for i in range(16)]
    while own.stats().load.running < len(running):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await own.load_weights(sender.send(new.named_parameters(), 1))
    generations = await asyncio.gather(*running)
    mixed = 0
    for index, generation in enumerate(generations):
        steps = np.diff(generation.versions)
        assert set(generation.versions.tolist()) <= {0, 1}
        assert (steps >= 0).all()
        mixed += int(steps.sum())
        by_old, by_new = (reference(model, prompt(index, 20), generation) for model in (old, new))
        expected = np.where(generation.versions == 0, by_old, by_new)
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)
    assert mixed >= 8
    assert own.stats().paused_s > 0


async def test_kept_keys_and_values_serve_requests_in_flight_and_no_later_one(
    kind: str, tmp_path: Path, sender: SharedMemorySender
) -> None:
    old, new = random_llama(seed=0), random_llama(seed=1)
    engine_settings = EngineConfig(max_num_seqs=64, kv_cache_gib=0.06)
    weights = WeightsConfig(kv_on_publish="keep")
    engine = made(kind, saved(old, tmp_path / "model"), engine=engine_settings, weights=weights)
    await engine.start()
    try:
        await engine.generate(request(prompt(1, 140), max_tokens=4, seed=0))
        again = await engine.generate(request(prompt(1, 140), max_tokens=4, seed=0))
        assert again.cached_tokens >= 128
        running = [asyncio.create_task(engine.generate(request(prompt(i, 140), max_tokens=110, seed=i))) for i in range(8)]
        while engine.stats().load.running < len(running):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await engine.load_weights(sender.send(new.named_parameters(), 1))
        later = await engine.generate(request(prompt(1, 140), max_tokens=4, seed=0))
        mixed = 0
        for index, generation in enumerate(await asyncio.gather(*running)):
            before = int((generation.versions == 0).sum())
            assert (np.diff(generation.versions) >= 0).all()
            mixed += 0 < before < 110
            np.testing.assert_allclose(generation.logprobs, switched(old, new, prompt(index, 140), generation, before), atol=1e-4)
    finally:
        await engine.close()
    assert mixed >= 4
    assert later.cached_tokens == 0
    assert set(later.versions.tolist()) == {1}
    np.testing.assert_allclose(later.logprobs, reference(new, prompt(1, 140), later), atol=1e-4)


@torch.no_grad()
def switched(old: Any, new: Any, prompt_ids: list[int], generation: Generation, before: int) -> np.ndarray:
    """Log-probabilities if `new` takes over the keys and values of `old` after `before` sampled tokens. # [T]"""
    ids = torch.tensor([[*prompt_ids, *generation.token_ids.tolist()]])
    if not before:
        return reference(new, prompt_ids, generation)
    known = len(prompt_ids) + before - 1  # tokens processed by `old`; the last one that it sampled is not
    first = old(ids[:, :known], use_cache=True)
    second = new(ids[:, known:], past_key_values=first.past_key_values, use_cache=True)
    logits = torch.cat([first.logits, second.logits], 1)[0, len(prompt_ids) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt_ids) :, None])[:, 0].numpy()


async def test_a_missing_file_fences_the_engine(own: Engine) -> None:
    await expect_fence(own, WeightUpdate(version=4, transport="shm", payload={"update": {"path": "/nowhere.safetensors"}}), "nowhere")


async def test_after_a_failed_publication_everything_is_refused(own: Engine) -> None:
    await contract.ends_after_a_failed_publication(own, WeightUpdate(version=4, transport="shm"))


async def test_a_missing_tensor_fences_the_engine(own: Engine, sender: SharedMemorySender) -> None:
    most = [(name, tensor) for name, tensor in random_llama(seed=1).named_parameters() if "layers.1.mlp.down_proj" not in name]
    await expect_fence(own, sender.send(most, 4), "layers.1.mlp.down_proj")


async def test_another_transport_fences_the_engine(own: Engine) -> None:
    await expect_fence(own, WeightUpdate(version=4, transport="nccl", payload={"update": {}}), "nccl")


async def test_a_cancelled_publication_fences_the_engine(own: Engine, sender: SharedMemorySender) -> None:
    publication = asyncio.create_task(own.load_weights(sender.send(random_llama(seed=1).named_parameters(), 4)))
    await asyncio.sleep(0)
    publication.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publication
    with pytest.raises(EngineDeadError, match="did not load"):
        await own.generate(request([5]))


async def test_a_longer_prompt_of_the_same_session_is_not_computed_again(engine: Engine) -> None:
    first = await engine.generate(replace(request(prompt(50, 70), max_tokens=64, seed=4), session="episode"))
    longer = [*prompt(50, 70), *first.token_ids.tolist(), 7, 8, 9]
    cached = await engine.generate(replace(request(longer, max_tokens=20, seed=9), session="episode"))
    assert cached.cached_tokens >= 96
    assert cached.token_ids.tolist()


async def test_closing_fails_what_is_running(kind: str, model: Any, tmp_path: Path) -> None:
    engine = made(kind, saved(model, tmp_path))
    assert "not started" in str(await contract.refuses_before_start(engine))
    await engine.start()
    errors = await contract.ends_when_closed(engine)
    assert len(errors) == 2
    assert all("closed" in str(error) for error in errors)


async def test_a_publication_of_the_same_weights_changes_the_version_alone(kind: str, model: Any, tmp_path: Path) -> None:
    engine = made(kind, saved(model, tmp_path / "model"))
    await engine.start()
    try:
        (tmp_path / "shm").mkdir()
        await contract.takes_the_same_weights(engine, tmp_path / "model", tmp_path / "shm")
    finally:
        await engine.close()


async def test_a_sleeping_engine_keeps_its_requests_and_takes_weights_before_its_cache_is_back(
    kind: str, own: Engine, sender: SharedMemorySender
) -> None:
    if kind == "shared":
        pytest.skip("an engine that is shared does not sleep: --colocate is refused with it")
    assert isinstance(own, SleepingEngine)
    asked = request(prompt(3), max_tokens=CONTEXT - 100, temperature=1.0, seed=5)
    generating = asyncio.create_task(own.generate(asked))
    while not own.stats().load.running:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await own.sleep(1)
    await own.sleep(1)
    busy_s = own.stats().busy_s
    late = asyncio.create_task(own.generate(request(prompt(1), max_tokens=8, temperature=1.0, seed=1)))
    await own.wake("weights")
    newer = random_llama(seed=1)
    assert await own.load_weights(sender.send(newer.named_parameters(), 1)) == 1
    assert own.stats().busy_s == busy_s  # it has paused all the time
    assert not generating.done()
    assert not late.done()
    await own.wake("weights", "kv_cache")
    await own.wake("weights", "kv_cache")
    generation, second = await generating, await late
    versions = generation.versions.tolist()
    assert versions == sorted(versions)
    assert set(second.versions.tolist()) == {1}
    np.testing.assert_allclose(second.logprobs, reference(newer, prompt(1), second, 1.0), atol=1e-4)
