"""Real engines compare what they compute with after a publication with the learner's weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

from agentrl.core.errors import EngineDeadError, WeightsDifferError
from agentrl.core.protocols import WeightUpdate
from agentrl.engine import slot_model
from agentrl.engine.transformers_engine import TransformersEngine
from agentrl.engine.vllm_engine import VllmEngine
from agentrl.weights import vllm_backend
from agentrl.weights.digests import DIGESTS, expected
from agentrl.weights.sender import SharedMemorySender
from tests.e2e.vllm_support import CONTEXT, random_llama, request, saved, settings

pytestmark = pytest.mark.anyio


def random_qwen(*, seed: int = 0) -> Any:
    """A Qwen2 with biases and an output layer of its own, of three key heads, so that nothing in it is square."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": 250, "hidden_size": 96, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 6}
    config = Qwen2Config(**sizes, num_key_value_heads=3, max_position_embeddings=CONTEXT, tie_word_embeddings=False)
    return Qwen2ForCausalLM(config).float().eval()


def update_to(model: Any, version: int, sender: SharedMemorySender) -> WeightUpdate:
    named = list(model.named_parameters())
    update = sender.send(named, version)
    return replace(update, payload={**update.payload, DIGESTS: expected(named, "float32")})


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[SharedMemorySender]:
    sender = SharedMemorySender(tmp_path / "shm")
    yield sender
    sender.close()


async def refused(engine: Any, update: WeightUpdate, names: str) -> None:
    with pytest.raises(WeightsDifferError, match=names):
        await engine.load_weights(update)
    with pytest.raises(EngineDeadError):
        await engine.generate(request([5, 6, 7], max_tokens=2))
    await engine.close()


@pytest.mark.timeout(300)
async def test_all_weights_of_vllm_are_compared_and_a_stale_output_layer_is_found(
    tmp_path: Path, sender: SharedMemorySender, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the repair of `repack_lm_heads` vLLM multiplies by the old embedding, and no error tells."""
    engine = VllmEngine(settings(saved(random_llama(seed=0), tmp_path / "model")))
    await engine.start()
    assert await engine.load_weights(update_to(random_llama(seed=1), 1, sender)) == 1
    assert "not compared" not in caplog.text
    monkeypatch.setattr(vllm_backend, "repack_lm_heads", lambda model: None)
    await refused(engine, update_to(random_llama(seed=2), 2, sender), r"1 of 21 tensors .*: lm_head\.weight")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["transposed", "stale"])
async def test_a_wrong_tensor_in_vllm_is_named(
    fault: str, tmp_path: Path, sender: SharedMemorySender, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = VllmEngine(settings(saved(random_qwen(seed=0), tmp_path / "model")))
    await engine.start()
    assert await engine.load_weights(update_to(random_qwen(seed=1), 1, sender)) == 1
    assert "not compared" not in caplog.text
    before, read = dict(random_qwen(seed=1).named_parameters()), vllm_backend._tensors

    def spoiled(path: str) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read(path):
            if fault == "transposed" and name.endswith("layers.1.self_attn.o_proj.weight"):
                tensor = tensor.T
            if fault == "stale" and name.endswith("layers.0.mlp.up_proj.weight"):
                tensor = before[name].detach()
            yield name, tensor

    monkeypatch.setattr(vllm_backend, "_tensors", spoiled)
    name = r"layers\.1\.self_attn\.o_proj" if fault == "transposed" else r"layers\.0\.mlp\.up_proj"
    await refused(engine, update_to(random_qwen(seed=2), 2, sender), rf"1 of 27 tensors .*: model\.{name}\.weight")


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_an_engine_of_two_workers_compares_their_parts(
    tmp_path: Path, sender: SharedMemorySender, caplog: pytest.LogCaptureFixture
) -> None:
    """The single key head of the model is on both."""
    own = settings(saved(random_llama(seed=0), tmp_path / "model"))
    engine = VllmEngine(replace(own, engine=replace(own.engine, tensor_parallel_size=2)))
    await engine.start()
    assert await engine.load_weights(update_to(random_llama(seed=1), 1, sender)) == 1
    assert "not compared" not in caplog.text
    wrong = update_to(random_llama(seed=2), 2, sender)
    wrong.payload[DIGESTS]["tensors"]["model.layers.0.mlp.down_proj.weight"][0] += 1
    await refused(engine, wrong, r"1 of 21 tensors .*: model\.layers\.0\.mlp\.down_proj\.weight")


async def test_the_engine_of_transformers_compares_its_weights(
    tmp_path: Path, sender: SharedMemorySender, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = TransformersEngine(settings(saved(random_llama(seed=0), tmp_path / "model")))
    await engine.start()
    assert await engine.load_weights(update_to(random_llama(seed=1), 1, sender)) == 1
    assert "not compared" not in caplog.text
    load = slot_model.SlotModel.load

    def turned(self: Any, path: str) -> None:
        load(self, path)
        parameter = dict(self.named_parameters())["model.layers.1.self_attn.q_proj.weight"]
        parameter.copy_(parameter.T.clone())

    monkeypatch.setattr(slot_model.SlotModel, "load", turned)
    await refused(engine, update_to(random_llama(seed=2), 2, sender), r"1 of \d+ tensors .*: model\.layers\.1\.self_attn\.q_proj\.weight")
