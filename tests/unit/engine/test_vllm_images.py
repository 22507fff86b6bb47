"""Prompts of vLLM with images: each image is processed once, alone, and stands where it stands in the prompt."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from transformers import CONFIG_MAPPING
from vllm.multimodal.inputs import PlaceholderRange

from agentrl.core.errors import EngineError
from agentrl.core.images import ImageInput, ImageTensor, expand
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import Sampling, ints
from agentrl.engine import vllm_images
from agentrl.engine.launch import image_problem
from agentrl.engine.vllm_images import ImagePrompts
from agentrl.env.images import image_text
from agentrl.rollout.image_urls import ImageFetcher
from agentrl.rollout.images import image_bytes

pytestmark = pytest.mark.anyio
MARK, TOKENS = 9, (7, 9, 9, 8)


def image(name: str) -> ImageInput:
    data = image_bytes(image_text(np.full((2, 2, 3), len(name), dtype=np.uint8)), ImageFetcher(()))
    tensors = {"pixel_values": ImageTensor(np.zeros(100, dtype=np.uint8), 0)}
    return ImageInput(key=name, data=data, token_ids=ints(list(TOKENS)), placeholder=MARK, tensors=tensors)


class Renderer:
    """Makes four tokens of a placeholder, of which the middle two are pixels; the first time fails if told so."""

    def __init__(self, fails: bool = False) -> None:
        self.asked, self.fails = Counter[str](), fails

    async def render_cmpl_async(self, prompts: list[Any]) -> list[Any]:
        (prompt,) = prompts
        (name,) = prompt["multi_modal_uuids"]["image"]
        assert prompt["prompt_token_ids"] == [MARK]
        assert prompt["multi_modal_data"]["image"][0].size == (2, 2)
        self.asked[name] += 1
        await asyncio.sleep(0)
        if self.fails and self.asked[name] == 1:
            raise RuntimeError("no memory")
        parts = {"mm_kwargs": {"image": [f"item {name}"]}, "mm_hashes": {"image": [f"hash {name}"]}}
        return [{"prompt_token_ids": list(TOKENS), "mm_placeholders": {"image": [PlaceholderRange(offset=1, length=2)]}, **parts}]


def request(*images: ImageInput) -> GenerationRequest:
    ids, placed = expand([3, *(token for _ in images for token in (MARK, 20))], images, MARK)
    return GenerationRequest(request_id="r", prompt_ids=ints(ids), sampling=Sampling(), placed=placed)


def prompts_of(renderer: Renderer) -> ImagePrompts:
    theirs: Any = renderer
    return ImagePrompts(theirs)


async def test_prompts_are_put_together_of_images_that_are_made_once() -> None:
    renderer, a, b = Renderer(), image("a"), image("bb")
    prompts = prompts_of(renderer)
    both, one, again = await asyncio.gather(
        *(prompts.prompt(each, {"cache_salt": "7"}) for each in (request(a, b), request(b), request(b, a)))
    )
    assert renderer.asked == {"a": 1, "bb": 1}
    assert both["prompt_token_ids"] == [3, *TOKENS, 20, *TOKENS, 20]
    assert [(each.offset, each.length) for each in both["mm_placeholders"]["image"]] == [(2, 2), (7, 2)]
    assert (both["mm_kwargs"]["image"], both["mm_hashes"]["image"]) == (["item a", "item bb"], ["hash a", "hash bb"])
    assert (one["mm_hashes"]["image"], again["mm_hashes"]["image"]) == (["hash bb"], ["hash bb", "hash a"])
    assert (both["type"], both["cache_salt"]) == ("multimodal", "7")
    assert "cache_salt" not in await prompts.prompt(request(a), {})


async def test_other_tokens_than_the_learners_are_refused_each_time() -> None:
    prompts, good = prompts_of(Renderer()), image("a")
    await prompts.prompt(request(good), {})
    short = ImageInput(key="a", data=good.data, token_ids=ints([7, 9, 8]), placeholder=MARK, tensors=good.tensors)
    with pytest.raises(EngineError, match="request r: the engine made 4 tokens of an image of which the learner has 3"):
        await prompts.prompt(request(short), {})


async def test_a_failure_is_not_kept() -> None:
    renderer = Renderer(fails=True)
    prompts = prompts_of(renderer)
    with pytest.raises(RuntimeError, match="no memory"):
        await prompts.prompt(request(image("a")), {})
    assert (await prompts.prompt(request(image("a")), {}))["mm_hashes"]["image"] == ["hash a"]


async def test_the_images_of_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer, images = Renderer(), [image(name) for name in ("a", "bb", "ccc")]
    monkeypatch.setattr(vllm_images, "CACHE_BYTES", 2 * (len(images[0].data) + 100) + 50)
    prompts = prompts_of(renderer)
    for each in (images[0], images[1], images[0], images[2], images[0], images[1]):
        await prompts.prompt(request(each), {})
    assert renderer.asked == {"a": 1, "bb": 2, "ccc": 1}


async def test_a_cancelled_request_does_not_stop_the_work_of_others() -> None:
    renderer = Renderer()
    prompts = prompts_of(renderer)
    first, second = (asyncio.create_task(prompts.prompt(request(image("a")), {})) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second)["mm_hashes"]["image"] == ["hash a"]
    assert renderer.asked == {"a": 1}


async def test_images_that_a_cpu_would_compute_otherwise_are_refused() -> None:
    problem, theirs = image_problem(CONFIG_MAPPING["gemma3"](), "cpu"), Renderer()
    with pytest.raises(EngineError, match="request r: on a CPU vLLM does not let the tokens of an image attend to each other"):
        await ImagePrompts(theirs, problem).prompt(request(image("a")), {})  # type: ignore[arg-type]
    assert image_problem(CONFIG_MAPPING["gemma3"](), "cuda") == ""
    assert image_problem(CONFIG_MAPPING["qwen2_5_vl"](), "cpu") == ""
