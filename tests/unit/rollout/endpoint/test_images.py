"""Screenshots of black-box agents: the model sees them in every dialect, and histories with other pictures are other histories."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agentrl import ModelEndpoint, Task
from agentrl.core.images import check_places
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import Status
from agentrl.env.plan import ImageConfig
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.image_urls import ImageFetcher
from agentrl.rollout.images import open_reader
from tests.image_support import picture, reader_of
from tests.unit.rollout.endpoint.support import caller, play_one

pytestmark = pytest.mark.anyio
PATHS = ("chat/completions", "messages", "responses")


@pytest.fixture(scope="module")
def codec(vision_model: str) -> ChatCodec:
    made = ChatCodec(load_tokenizer(vision_model))
    made.images = reader_of(vision_model)
    return made


def encoded(seed: int) -> str:
    file = io.BytesIO()
    Image.fromarray(picture(seed)).save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()


def asks(path: str, text: str, seed: int) -> dict[str, Any]:
    """A message of the user with a screenshot, in the words of a dialect."""
    data = encoded(seed)
    url = f"data:image/png;base64,{data}"
    parts: dict[str, list[Any]] = {
        "chat/completions": [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}],
        "responses": [{"type": "input_text", "text": text}, {"type": "input_image", "image_url": url}],
        "messages": [
            {"type": "text", "text": text},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
        ],
    }
    return {"role": "user", "content": parts[path]}


def body(path: str, messages: list[Any]) -> dict[str, Any]:
    limits = {"messages": {"max_tokens": 9}}.get(path, {})
    return {"model": "m", "input" if path == "responses" else "messages": messages, **limits}


@pytest.mark.parametrize("path", PATHS)
async def test_a_conversation_with_screenshots_is_one_context(codec: ChatCodec, path: str) -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        first, second = asks(path, "See:", 1), asks(path, "And now?", 2)
        async with caller(llm) as client:
            answers = [await client.post(path, json=body(path, [first]))]
            answers.append(await client.post(path, json=body(path, [first, {"role": "assistant", "content": "a red one"}, second])))
            assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]
        return 1.0

    stage, trajectory = await play_one(run, "a red one", codec=codec)
    assert (trajectory.status, trajectory.error) == (Status.FINISHED, None)
    assert [len(turn.images) for turn in trajectory.turns] == [1, 1]
    assert not trajectory.turns[1].fresh
    placeholder = codec.images.placeholder if codec.images else -1
    for request in stage.engine.requests:
        check_places("r", request.prompt_ids, request.placed, [placeholder])
    assert trajectory.turns[0].prompt_text == "<|user|>See:<image><|end|><|assistant|>"
    pixels = np.asarray(stage.engine.requests[1].placed[1].image.tensors["pixel_values"].array)
    assert np.abs(pixels[0, 0].transpose(1, 2, 0) * 127.5 + 127.5 - picture(2)).max() < 1
    assert trajectory.metrics["endpoint/images_omitted"] == 0


async def test_another_screenshot_is_another_history(codec: ChatCodec) -> None:
    path = "chat/completions"

    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with caller(llm) as client:
            for seed in (1, 2):
                history = [asks(path, "See:", seed), {"role": "assistant", "content": "red"}, {"role": "user", "content": "Sure?"}]
                await client.post(path, json=body(path, history[:1]))
                await client.post(path, json=body(path, history))
        return 1.0

    _, trajectory = await play_one(run, "red", codec=codec)
    assert [turn.fresh for turn in trajectory.turns] == [False, False, True, False]
    assert len({turn.images[0].image.key for turn in trajectory.turns if turn.images}) == 2


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (ImageConfig(max_images=1), "2 images are more than 1 (--max-images)"),
        (ImageConfig(max_image_pixels=4095), "64 x 64 pixels, more than 4,095 (--max-image-pixels)"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
async def test_limits_of_images_hold_in_every_dialect(vision_model: str, path: str, limits: ImageConfig, words: str) -> None:
    few, seen = ChatCodec(load_tokenizer(vision_model)), list[Any]()
    few.images = open_reader(vision_model, limits)

    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with caller(llm) as client:
            answer = await client.post(path, json=body(path, [asks(path, "One", 1), asks(path, "Two", 2)]))
            seen.append((answer.status_code, answer.text))
        return 1.0

    stage, _ = await play_one(run, "red", codec=few)
    assert seen[0][0] == 400
    assert words in seen[0][1]
    assert not stage.engine.requests


async def test_a_screenshot_at_an_address_of_a_named_host_is_fetched(codec: ChatCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFetcher, "fetch", lambda self, address: base64.b64decode(encoded(int(address[-1]))))
    monkeypatch.setattr(codec.images, "_fetcher", ImageFetcher(["shots.example.com"]))

    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with caller(llm) as client:
            parts = [{"type": "image_url", "image_url": {"url": "https://shots.example.com/4"}}]
            answer = await client.post("chat/completions", json=body("chat/completions", [{"role": "user", "content": parts}]))
            assert answer.status_code == 200, answer.text
        return 1.0

    stage, trajectory = await play_one(run, "red", codec=codec)
    assert (trajectory.status, trajectory.error) == (Status.FINISHED, None)
    pixels = np.asarray(stage.engine.requests[0].placed[0].image.tensors["pixel_values"].array)
    assert np.abs(pixels[0, 0].transpose(1, 2, 0) * 127.5 + 127.5 - picture(4)).max() < 1


@pytest.mark.parametrize(
    ("url", "words"),
    [("/etc/hostname", "is no data URL"), ("https://example.com/a.png", "is no data URL"), ("data:image/png;base64,AAAA", "no image")],
)
async def test_images_that_cannot_be_used_are_refused_by_name(codec: ChatCodec, url: str, words: str) -> None:
    seen: list[Any] = []

    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with caller(llm) as client:
            parts = [{"type": "image_url", "image_url": {"url": url}}]
            answer = await client.post("chat/completions", json=body("chat/completions", [{"role": "user", "content": parts}]))
            seen.append((answer.status_code, answer.json()["error"]["message"]))
        return 1.0

    await play_one(run, "red", codec=codec)
    assert seen[0][0] == 400
    assert words in seen[0][1]
