"""Engines that read images: their log-probabilities are the learner's, and no prompt is expanded twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.core.errors import EngineError
from agentrl.core.images import PlacedImage
from agentrl.core.protocols import Engine, GenerationRequest, WeightUpdate
from agentrl.core.types import Sampling, ints
from agentrl.engine.plan import EngineConfig
from agentrl.engine.settings import EngineSettings, prepare_environment
from agentrl.engine.transformers_engine import TransformersEngine
from agentrl.engine.vllm_engine import VllmEngine
from agentrl.rollout.images import ImageReader
from agentrl.rollout.plan import ModelConfig
from tests.image_support import Player, mismatch, picture, reader_of

pytestmark = pytest.mark.anyio
CLOSE = 1e-4
"""Nats between engine and learner."""
KINDS = [pytest.param(TransformersEngine, id="transformers"), pytest.param(VllmEngine, id="vllm", marks=pytest.mark.vllm)]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def reader(vision_model: str) -> ImageReader:
    return reader_of(vision_model)


@pytest.fixture(scope="module", params=KINDS)
async def engine(request: pytest.FixtureRequest, vision_model: str) -> AsyncIterator[Engine]:
    prepare_environment("cpu")
    model, limits = ModelConfig(model=vision_model), EngineConfig(kv_cache_gib=0.05, max_num_seqs=8, max_model_len=256)
    found: Engine = request.param(EngineSettings(model=model, engine=limits, max_images=4))
    await found.start()
    yield found
    await found.close()


def loaded(path: str) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(path)


def scaled(model: Any) -> Any:
    """The model itself, with other weights in both of its parts."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model


async def published(engine: Engine, version: int, model: Any, folder: Path) -> None:
    model.save_pretrained(folder / f"version-{version}")
    path = str(folder / f"version-{version}" / "model.safetensors")
    assert await engine.load_weights(WeightUpdate(version=version, transport="shm", payload={"update": {"path": path}})) == version


async def test_log_probabilities_are_the_learners_in_every_turn_and_after_a_publication(
    engine: Engine, reader: ImageReader, vision_model: str, tmp_path: Path
) -> None:
    model = loaded(vision_model)
    player = Player(engine, reader, "before")
    played = await asyncio.gather(*(player.play(episode) for episode in range(6)))
    assert mismatch(played, model) < CLOSE
    assert engine.stats().cached_tokens > 0
    scaled(model)
    await published(engine, 1, model, tmp_path)
    again = await asyncio.gather(*(Player(engine, reader, "after").play(episode) for episode in range(6)))
    assert mismatch(again, model) < CLOSE
    assert mismatch([replace(t, turns=t.turns[:1]) for t in played], model) > CLOSE


async def test_pictures_found_in_the_cache_are_seen_again_by_new_weights(
    engine: Engine, reader: ImageReader, vision_model: str, tmp_path: Path
) -> None:
    """Requests of later turns, whose first pictures were not computed again, are amid sampling when a publication forgets all keys."""
    old, new, sampling = loaded(vision_model), scaled(loaded(vision_model)), set[int]()
    await published(engine, 2, old, tmp_path)
    began = asyncio.Event()

    def heard(episode: int) -> None:
        sampling.add(episode)
        if len(sampling) == 6:
            began.set()

    player, before = Player(engine, reader, "amid"), engine.stats().cached_tokens
    plays = [asyncio.create_task(player.play(n, 120, lambda _, n=n: heard(n))) for n in range(6)]
    await began.wait()
    await published(engine, 3, new, tmp_path)
    played = await asyncio.gather(*plays)
    assert engine.stats().cached_tokens > before
    assert {int(version) for each in played for version in each.turns[1].versions} == {2, 3}
    assert mismatch(played, old, version=2) < CLOSE
    assert mismatch(played, new, version=3) < CLOSE


async def test_prompts_that_do_not_fit_their_images_are_refused(engine: Engine, reader: ImageReader) -> None:
    mark = reader.placeholder
    (image,) = await reader.read([picture(1)])
    ids, placed = reader.expand([3, mark, 20, 4], [image])
    player = Player(engine, reader, "odd")
    with pytest.raises(EngineError, match="1 placeholders of images in the prompt have no image, beside 0"):
        await player.sample(0, 0, [3, mark, 20, 4], ())  # compact, which an engine would take for a picture of one token
    with pytest.raises(EngineError, match="4 placeholders of images in the prompt have no image, beside 1"):
        await player.sample(0, 1, [*ids, *image.token_ids.tolist(), 4], placed)
    with pytest.raises(EngineError, match="1 placeholders of images in the prompt have no image, beside 1"):
        await player.sample(0, 3, [*ids, mark, 4], placed)  # two placeholders and one image
    with pytest.raises(EngineError, match="tokens of an image are not at place 2"):
        await player.sample(0, 2, ids, [each.moved(1) for each in placed])


async def test_other_tokens_in_the_engine_are_refused_with_both_lengths(engine: Engine, reader: ImageReader) -> None:
    """An image whose tokens are fewer than those that the engine's own processor makes of it."""
    if not isinstance(engine, VllmEngine):
        pytest.skip("this engine has no processor of its own")
    (image,) = await reader.read([picture(1)])
    short = replace(image, token_ids=image.token_ids[1:])
    ids, placed = reader.expand([3, reader.placeholder, 20, 4], [short])
    for _ in range(2):  # the second time the image is known
        with pytest.raises(
            EngineError, match=f"made {len(image.token_ids)} tokens of an image of which the learner has {len(short.token_ids)}"
        ):
            await Player(engine, reader, "short").sample(0, 0, ids, placed)


async def test_vllm_processes_an_image_once_for_all_requests(engine: Engine, reader: ImageReader, monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(engine, VllmEngine):
        pytest.skip("this engine has no processor of its own")
    render, prompts = engine._llm.renderer.render_cmpl_async, list[Any]()

    async def counted(asked: list[Any]) -> Any:
        prompts.extend(asked)
        return await render(asked)

    monkeypatch.setattr(engine._llm.renderer, "render_cmpl_async", counted)
    one, two = await reader.read([picture(91), picture(92)])
    ids, placed = reader.expand([3, reader.placeholder, 20, reader.placeholder, 4], [one, two])
    found = await asyncio.gather(*(Player(engine, reader, "once").sample(number % 2, number, ids, placed) for number in range(6)))
    assert [prompt["prompt_token_ids"] for prompt in prompts] == [[reader.placeholder]] * 2
    assert len({tuple(each.token_ids) for each in found}) == 2  # of two seeds


async def test_placeholders_are_never_sampled(engine: Engine, reader: ImageReader) -> None:
    (image,) = await reader.read([picture(1)])
    ids, placed = reader.expand([3, reader.placeholder, 20, 4], [image])
    name, wanted = "hot", Sampling(max_tokens=200, seed=1, temperature=2.0)
    generation = await engine.generate(GenerationRequest(request_id=name, prompt_ids=ints(ids), sampling=wanted, placed=placed))
    assert reader.placeholder not in generation.token_ids.tolist()


async def test_an_engine_of_text_refuses_images_by_name(reader: ImageReader) -> None:
    from agentrl.assets import tiny_model_path

    prepare_environment("cpu")
    limits = EngineConfig(kv_cache_gib=0.05, max_num_seqs=2, max_model_len=64)
    engine = TransformersEngine(EngineSettings(model=ModelConfig(model=str(tiny_model_path())), engine=limits))
    await engine.start()
    try:
        for given in ({"images": ("a.png",)}, {"placed": tuple(PlacedImage(0, each) for each in await reader.read([picture(1)]))}):
            with pytest.raises(EngineError, match="this engine takes text only, got 1 images"):
                await engine.generate(GenerationRequest(request_id="r", prompt_ids=ints([5, 6]), sampling=Sampling(), **given))
    finally:
        await engine.close()
