"""Publication to the real engine: what it samples from afterwards, and what happens when it fails."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from agentrl.core.errors import TransferAbandonedError
from agentrl.core.protocols import Membership
from agentrl.engine.vllm_engine import VllmEngine
from agentrl.weights.buckets import describe
from agentrl.weights.sender import SharedMemorySender
from agentrl.weights.vllm_backend import repack_lm_heads
from agentrl.weights.vllm_groups import GroupTransfer
from tests.e2e.vllm_support import expect_fence, prompt, random_llama, reference, request, saved, settings
from tests.group_support import connect_sockets
from tests.group_support import sender as sender_to_groups

pytestmark = pytest.mark.anyio


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[SharedMemorySender]:
    (tmp_path / "shm").mkdir()
    sender = SharedMemorySender(tmp_path / "shm")
    yield sender
    sender.close()


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(settings(saved(random_llama(seed=0), tmp_path / "model")))
    await engine.start()
    yield engine
    await engine.close()


async def test_half_of_a_fused_layer_fences_the_engine(engine: VllmEngine, sender: SharedMemorySender) -> None:
    most = [(name, tensor) for name, tensor in random_llama(seed=1).named_parameters() if "layers.1.self_attn.q_proj" not in name]
    await expect_fence(engine, sender.send(most, 4), "layers.1.self_attn.qkv_proj")


async def test_an_engine_that_reports_another_version_is_fenced(
    engine: VllmEngine, sender: SharedMemorySender, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stuck() -> str:
        return "0"

    monkeypatch.setattr(engine._llm, "get_weight_version", stuck)
    await expect_fence(engine, sender.send(random_llama(seed=1).named_parameters(), 4), "reports version '0'")


class CpuGroups(GroupTransfer):
    """The engines' side of publication between GPUs, in vLLM on a CPU: only the channel is another."""

    connect = staticmethod(connect_sockets)

    def make_row_invariant(self) -> None:
        return

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        repack_lm_heads(self.model)


async def test_an_engine_whose_transfer_is_given_up_takes_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the weights arrive; requests wait until all of them came in another group, and are sampled by those."""
    from agentrl.engine import launch

    WeightTransferEngineFactory._registry.pop("agentrl_test", None)
    WeightTransferEngineFactory.register_engine("agentrl_test", CpuGroups)
    monkeypatch.setitem(launch._BACKENDS, "shm", "agentrl_test")
    engine, learner = VllmEngine(settings(saved(random_llama(seed=0), tmp_path / "model"))), sender_to_groups(bucket_bytes=2000)
    await engine.start()
    newer = dict(random_llama(seed=1).named_parameters())

    class Half:
        """Weights of which some come only when the transfer has been given up."""

        def __init__(self) -> None:
            self.given_up = threading.Event()

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for index, (name, tensor) in enumerate(newer.items()):
                if index == len(newer) // 2:
                    assert self.given_up.wait(30)
                yield name, tensor.detach()

    half = Half()
    half.given_up.set()  # while they are described
    try:
        learner._infos = describe(half)
        half.given_up.clear()
        update = learner.send(half, 1, Membership(1, ("engine-0",)))
        loading = asyncio.create_task(engine.load_weights(replace(update, transport="shm")))
        while learner._group is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(engine.generate(request(prompt(2), max_tokens=8, temperature=1.0, seed=3)))
        giving_up = asyncio.create_task(asyncio.to_thread(learner.abandon, "a member was lost"))
        with pytest.raises(TransferAbandonedError, match="a member was lost"):
            await loading
        half.given_up.set()
        await giving_up
        assert not waiting.done()
        assert engine.stats().fault == ""
        again = learner.send(newer.items(), 1, Membership(2, ("engine-0",)))
        assert await engine.load_weights(replace(again, transport="shm")) == 1
        generation = await waiting
        assert set(generation.versions.tolist()) == {1}
        np.testing.assert_allclose(generation.logprobs, reference(random_llama(seed=1), prompt(2), generation, 1.0), atol=1e-4)
    finally:
        half.given_up.set()
        learner.close()
        await engine.close()


async def test_requests_of_a_vllm_without_stamps_have_one_version_each(
    tmp_path: Path, sender: SharedMemorySender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with vLLM 0.26: the publication waits for the request under way, and the one that comes meanwhile waits for it."""
    monkeypatch.setattr("agentrl.engine.vllm_engine.stamps_tokens", lambda: False)
    engine = VllmEngine(settings(saved(random_llama(seed=0), tmp_path / "model")))
    await engine.start()
    old, new = random_llama(seed=0), random_llama(seed=1)
    running = asyncio.create_task(engine.generate(request(prompt(1, 20), max_tokens=100, seed=0)))
    await asyncio.sleep(0.05)
    loading = asyncio.create_task(engine.load_weights(sender.send(new.named_parameters(), 3)))
    await asyncio.sleep(0)
    later = asyncio.create_task(engine.generate(request(prompt(1, 20), max_tokens=20, seed=0)))
    first, version, second = await asyncio.gather(running, loading, later)
    assert (version, len(first.token_ids), set(first.versions), set(second.versions)) == (3, 100, {0}, {3})
    np.testing.assert_allclose(first.logprobs, reference(old, prompt(1, 20), first), atol=1e-4)
    np.testing.assert_allclose(second.logprobs, reference(new, prompt(1, 20), second), atol=1e-4)
    await engine.close()
