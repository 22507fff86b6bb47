"""Episodes with images: one processing, expanded prompts, budgets that count the tokens of images, and refusals by name."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import re
import shutil
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agentrl import AgentInstance, ResetResult, StepResult
from agentrl.assets import tiny_model_path
from agentrl.config.sections import changed
from agentrl.core.errors import EnvResultError
from agentrl.core.images import check_places, compacted, expand
from agentrl.core.protocols import GenerationRequest
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import Message, Status, Task, Trajectory, ints
from agentrl.engine.fenced import FencedEngine
from agentrl.env import images as env_images
from agentrl.env.boundary import EnvSession
from agentrl.env.executor import Executor, ExecutorSession
from agentrl.env.plan import ImageConfig
from agentrl.env.threads import Threads
from agentrl.learner.batch import collate
from agentrl.rollout import images
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.episode import Episode
from agentrl.rollout.executor_episode import ExecutorEpisode
from agentrl.rollout.group import run_group
from agentrl.rollout.images import ImageReader, Processor, decoded, open_reader
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import CODEC, SETTINGS, TASK, Scene

pytestmark = pytest.mark.anyio
TOKENS = 7
"""Tokens of an image of the model."""
PNG_OF_NOTHING = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(17)
"""A file whose width and height are 0."""


def picture(seed: int, side: int = 64) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)


def png(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format=form, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def reader(vision_model: str) -> ImageReader:
    found = open_reader(vision_model, ImageConfig())
    assert found is not None
    return found


@pytest.fixture(scope="module")
def codec(vision_model: str, reader: ImageReader) -> ChatCodec:
    made = ChatCodec(load_tokenizer(vision_model))
    made.images = reader
    return made


class Pictures(AgentInstance):
    """Shows a picture at the beginning and one after each answer."""

    def reset(self, state: Any) -> ResetResult:
        return ResetResult("Look", images=[picture(0)])

    def step(self, state: Any) -> StepResult:
        return StepResult(1.0, "More", images=[picture(state.turn + 1)], terminated=state.turn == 2)


async def play(
    env: type[Any], codec: ChatCodec, images: tuple[Any, ...] = (), **changes: Any
) -> tuple[Trajectory, list[GenerationRequest]]:
    engine, settings = ScriptedEngine(lambda request: [40, 41, 1]), changed(replace(SETTINGS, is_training=False), **changes)
    scene = Scene(env)
    request = replace(scene.group_request, task=replace(TASK, images=images))
    await engine.start()
    episode: Any
    if issubclass(env, Executor):
        session: Any = ExecutorSession(env, "file.py", settings.env)
        episode = ExecutorEpisode(request, 0, engine=engine, codec=codec, env=session, settings=settings)
    else:
        session = EnvSession(env, "file.py", Threads(2), settings.env)
        episode = Episode(request, 0, engine=engine, codec=codec, env=session, settings=settings)
    (trajectory,) = await episode.run()
    return trajectory, engine.requests


async def test_every_form_of_an_image_is_processed_once(reader: ImageReader, tmp_path: Path) -> None:
    image = Image.fromarray(picture(5))
    (tmp_path / "a.png").write_bytes(png(image))
    found = await reader.read([picture(5), image, png(image), str(tmp_path / "a.png"), png(image, "BMP")])
    assert len({id(each) for each in found}) == 1
    assert len(found[0].token_ids) == TOKENS
    assert not found[0].tensors["pixel_values"].array.flags.writeable
    assert (await reader.read([picture(6)]))[0].key != found[0].key


async def test_the_same_file_is_decoded_once(vision_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, decode, seen = open_reader(vision_model, ImageConfig()), decoded, list[int]()
    monkeypatch.setattr(images, "decoded", lambda data, most: (seen.append(len(data)), decode(data, most))[1])
    assert reader is not None
    for _ in range(3):
        await reader.read([picture(77)])
    assert len(seen) == 1


def test_the_images_last_read_are_kept_within_a_limit_at_a_cost_that_does_not_grow(
    vision_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, size_of, measured = open_reader(vision_model, ImageConfig()), images._size_of, list[str]()
    assert reader is not None
    monkeypatch.setattr(images, "_size_of", lambda image: (measured.append(image.key), size_of(image))[1])
    (first,) = reader.read_here([picture(1)])
    monkeypatch.setattr(images, "CACHE_BYTES", 5 * size_of(first))
    for seed in range(20):
        reader.read_here([picture(seed), picture(1)])
    assert len(measured) < 2 * 20
    assert 3 <= len(reader._kept) <= 5
    assert first.key in reader._kept


def test_a_model_of_text_has_no_reader() -> None:
    assert open_reader(str(tiny_model_path()), ImageConfig()) is None


async def test_prompts_are_expanded_once_and_back(reader: ImageReader) -> None:
    images = await reader.read([picture(1), picture(2)])
    compact = [3, reader.placeholder, 20, reader.placeholder, 1]
    ids, placed = expand(compact, images, reader.placeholder)
    assert len(ids) == 3 + 2 * TOKENS
    assert [each.place for each in placed] == [1, 2 + TOKENS]
    assert compacted(ids, placed) == compact
    check_places("r", ints(ids), placed, [reader.placeholder])
    for count in (1, 3):
        with pytest.raises(EnvResultError, match=f"2 placeholders of images, and there are {count} images"):
            reader.expand(compact, (images * 2)[:count])
    with pytest.raises(EnvResultError, match=r"8 placeholders of images, and there are 2 images"):
        reader.expand(ids, images)


async def test_an_episode_has_the_expanded_tokens_in_each_turn(codec: ChatCodec) -> None:
    trajectory, requests = await play(Pictures, codec, images=(picture(9),))
    assert (trajectory.status, trajectory.error) == (Status.FINISHED, None)
    assert [len(turn.images) for turn in trajectory.turns] == [2, 1, 1]
    assert [len(request.placed) for request in requests] == [2, 3, 4]
    placeholder = codec.images.placeholder if codec.images else -1
    for turn, request in zip(trajectory.turns, requests, strict=True):
        check_places("r", request.prompt_ids, request.placed, [placeholder])
        check_places("r", turn.prompt_ids, turn.images, [placeholder])
    assert trajectory.turns[0].prompt_text == "<|user|><image><image>Look<|end|><|assistant|>"
    assert [number for number, _ in trajectory.images] == [0, 1, 2]


class AsyncPictures(Pictures):
    """The same, beside the event loop's other work."""

    async def reset(self, state: Any) -> ResetResult:
        return super().reset(state)

    async def step(self, state: Any) -> Any:
        result = super().step(state)
        return {"rewards": result.reward, "environment_feedback": "", "environment_images": list(result.images), "done": True}


@pytest.mark.parametrize("env", [Pictures, AsyncPictures])
async def test_files_of_pictures_are_written_beside_the_event_loop(codec: ChatCodec, monkeypatch: pytest.MonkeyPatch, env: Any) -> None:
    threads, write = list[int](), env_images._of_array
    monkeypatch.setattr(env_images, "_of_array", lambda array: (threads.append(threading.get_ident()), write(array))[1])
    trajectory, _ = await play(env, codec)
    assert (trajectory.status, trajectory.error) == (Status.FINISHED, None)
    assert len(threads) >= 2
    assert threading.get_ident() not in threads


async def test_members_share_what_was_made_of_an_image(codec: ChatCodec) -> None:
    (one, _), (two, _) = await play(Pictures, codec), await play(Pictures, codec)
    assert one.turns[0].images[0].image is two.turns[0].images[0].image


async def test_rows_have_their_images_where_the_tokens_are(codec: ChatCodec) -> None:
    async def member(index: int) -> tuple[Trajectory, ...]:
        played, _ = await play(Pictures, codec)
        return (replace(played, trajectory_id=str(index), episode_id=str(index)),)

    group = await run_group(Scene(Pictures).group_request, member, set())
    for row in collate([group]).rows:
        assert len(row.images) == 3
        check_places("row", row.tokens, row.images, [codec.images.placeholder if codec.images else -1])


async def test_tokens_of_images_count_in_the_budget(codec: ChatCodec) -> None:
    trajectory, requests = await play(Pictures, codec, max_episode_tokens=36)
    assert (trajectory.status, trajectory.overflowed, len(requests)) == (Status.TRUNCATED, True, 2)
    tiny, _ = await play(Pictures, codec, max_episode_tokens=10)
    assert tiny.status is Status.ENV_ERROR
    assert "the first prompt of task 'sum' has 1" in str(tiny.error)


async def test_too_many_images_are_refused_with_the_task(vision_model: str, codec: ChatCodec) -> None:
    few = ChatCodec(codec.tokenizer)
    few.images = open_reader(vision_model, ImageConfig(max_images=2))
    trajectory, _ = await play(Pictures, few)
    assert (trajectory.status, trajectory.reward) == (Status.ENV_ERROR, None)
    assert "task 'sum': 3 images are more than 2 (--max-images)" in str(trajectory.error)


def bomb() -> bytes:
    return png(Image.new("1", (5000, 5000)))


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (lambda: png(Image.fromarray(picture(1)))[:200], "damaged"),
        (lambda: b"no image", "8 bytes are no image that can be read"),
        (bomb, r"5000 x 5000 pixels, more than 8,388,608 \(--max-image-pixels\)"),
        (lambda: png(Image.new("CMYK", (4, 4)), "JPEG"), "mode CMYK; convert it to RGB"),
        (lambda: png(Image.new("L", (4, 4)), "GIF", save_all=True, append_images=[Image.new("L", (4, 4), 9)]), "animated: it has 2 frames"),
        (lambda: "https://example.com/a.png", "images are not fetched from addresses"),
        (lambda: "data:image/png;base64,!!", "data URL of an image is damaged"),
        (lambda: "missing.png", "No such file"),
    ],
)
async def test_bad_images_are_refused_by_name(codec: ChatCodec, image: Any, words: str) -> None:
    trajectory, requests = await play(Pictures, codec, images=(image(),))
    assert (trajectory.status, trajectory.reward, requests) == (Status.ENV_ERROR, None, [])
    assert re.search(words, str(trajectory.error))
    assert "task 'sum': image 0:" in str(trajectory.error)


@pytest.mark.parametrize("image", [np.zeros((0, 4, 3), np.uint8), Image.new("RGB", (0, 2)), PNG_OF_NOTHING])
async def test_an_image_without_pixels_is_refused_by_name(codec: ChatCodec, image: Any) -> None:
    shows = type("Shows", (Pictures,), {"reset": lambda self, state: ResetResult("Look", images=[image])})
    trajectory, requests = await play(shows, codec)
    assert (trajectory.status, trajectory.reward, requests) == (Status.ENV_ERROR, None, [])
    assert re.search("shape \\(0, 4, 3\\)|has no pixels|task 'sum': image 0: the 33 bytes are no image", str(trajectory.error))


def test_a_file_that_opens_without_pixels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "open", lambda file: Image.new("RGB", (0, 2)))
    with pytest.raises(ValueError, match="the image has no pixels"):
        decoded(b"", 100)


async def test_a_model_of_text_is_a_status_and_no_reward() -> None:
    def refuse(request: GenerationRequest) -> list[int]:
        FencedEngine._check(text_engine, request)
        return [40, 1]

    text_engine: Any = SimpleNamespace(max_model_len=999, _vocabulary=10**6, _placeholders=())
    engine = ScriptedEngine(refuse)
    await engine.start()
    session = EnvSession(Pictures, "file.py", Threads(2), SETTINGS.env)
    (trajectory,) = await Episode(Scene(Pictures).group_request, 0, engine=engine, codec=CODEC, env=session, settings=SETTINGS).run()
    assert (trajectory.status, trajectory.reward) == (Status.ENGINE_ERROR, None)
    assert "this engine takes text only, got 1 images" in str(trajectory.error)


async def test_images_in_messages_reach_an_engine_that_may_read_them_itself() -> None:
    own = [{"type": "image", "image": picture(1)}, {"type": "text", "text": "Look"}]
    shows = type("Shows", (Pictures,), {"reset": lambda self, state: ResetResult([Message(role="user", content=own)])})
    scene = Scene(shows)
    trajectory = await scene.play()
    assert len(scene.engine.requests[0].images) == 1
    assert trajectory.turns[0].prompt_text.endswith("user\nLook<|im_end|>\n<|im_start|>assistant\n")


async def test_a_model_without_a_chat_template_is_refused_with_the_remedy(vision_model: str, reader: ImageReader) -> None:
    tokenizer = load_tokenizer(vision_model)
    tokenizer.chat_template = None
    bare = ChatCodec(tokenizer)
    bare.images = reader
    trajectory, requests = await play(Pictures, bare)
    assert (trajectory.status, trajectory.reward, requests) == (Status.ENV_ERROR, None, [])
    assert "task 'sum': the tokenizer has no chat template" in str(trajectory.error)
    assert "--chat-template FILE" in str(trajectory.error)


def test_a_chat_template_beside_the_processor_is_the_tokenizers(vision_model: str, tmp_path: Path) -> None:
    shutil.copytree(vision_model, tmp_path / "model")
    template = (tmp_path / "model" / "chat_template.jinja").read_text()
    (tmp_path / "model" / "chat_template.jinja").unlink()
    assert load_tokenizer(str(tmp_path / "model")).chat_template is None
    (tmp_path / "model" / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(str(tmp_path / "model")).chat_template == template


async def test_each_picture_of_a_group_is_processed_once(vision_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four members of three turns: the picture of the prompt, that of `reset`, and those of two steps."""
    codec, runs, process = ChatCodec(load_tokenizer(vision_model)), list[str](), Processor.process
    codec.images = open_reader(vision_model, ImageConfig())

    def counted(self: Processor, image: Any, data: bytes, key: str) -> Any:
        runs.append(key)
        return process(self, image, data, key)

    monkeypatch.setattr(Processor, "process", counted)
    played = await asyncio.gather(*(play(Pictures, codec, images=(picture(9),)) for _ in range(4)))
    assert [len(trajectory.turns) for trajectory, _ in played] == [3] * 4
    assert (len(runs), len(set(runs))) == (4, 4)


@pytest.mark.parametrize("given", ["array", "file"])
async def test_a_live_episode_holds_no_pixels_of_its_own(codec: ChatCodec, tmp_path: Path, given: str) -> None:
    """Further members of a group take as much memory with a picture of 270,000 bytes as with one of 768."""
    grown = []
    for side in (16, 300):
        image: Any = picture(side, side)
        if given == "file":
            Image.fromarray(image).save(tmp_path / f"{side}.png")
            image = (tmp_path / f"{side}.png").read_bytes()
        shows = type("Shows", (Pictures,), {"reset": lambda self, state, image=image: ResetResult("Look", images=[image])})
        held = [await play(shows, codec)]
        gc.collect()
        tracemalloc.start()
        held += [await play(shows, codec) for _ in range(3)]
        gc.collect()
        grown.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert len(held) == 4
    assert abs(grown[1] - grown[0]) < 100_000


def test_transparent_places_are_white() -> None:
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    assert np.asarray(decoded(png(image), 10)).tolist() == [[[255, 0, 0], [255, 255, 255]]]


async def test_placeholders_without_images_are_refused(codec: ChatCodec) -> None:
    class Raw(AgentInstance):
        def reset(self, state: Any) -> dict[str, Any]:
            return {"observation": "<|user|><image>Look<|end|><|assistant|>", "environment_images": self.images}

        def step(self, state: Any) -> StepResult:
            return StepResult(1.0, terminated=True)

    trajectory, _ = await play(type("One", (Raw,), {"images": [picture(1)]}), codec)
    assert trajectory.status is Status.FINISHED
    for count in (0, 2):
        trajectory, _ = await play(type("Other", (Raw,), {"images": [picture(1)] * count}), codec)
        assert trajectory.status is Status.ENV_ERROR
        assert f"1 placeholders of images, and there are {count} images" in str(trajectory.error)


async def test_text_that_spells_the_placeholder_is_text(codec: ChatCodec) -> None:
    class Spelled(AgentInstance):
        def reset(self, state: Any) -> ResetResult:
            return ResetResult("An <image> here", images=[picture(1)])

        def step(self, state: Any) -> StepResult:
            return StepResult(1.0, terminated=True)

    trajectory, (request,) = await play(Spelled, codec)
    assert (trajectory.status, len(request.placed)) == (Status.FINISHED, 1)


async def test_an_executor_gives_compact_prompts(codec: ChatCodec) -> None:
    class Calls(Executor):
        async def execute(self, task: Task, llm: Any) -> StepResult:
            prompt = llm.encode_prompt([Message(role="user", content=[{"type": "image"}, {"type": "text", "text": "Look"}])])
            first = await llm.generate(prompt)
            await llm.generate([*first.ids, *llm.encode_next("More", first)])
            return StepResult(1.0, terminated=True)

    trajectory, requests = await play(Calls, codec, images=(picture(1),))
    assert (trajectory.status, trajectory.error, len(requests)) == (Status.FINISHED, None, 2)
    assert [len(turn.images) for turn in trajectory.turns] == [1, 0]
    assert not trajectory.turns[1].fresh


async def test_a_model_of_text_is_given_images_as_they_are() -> None:
    trajectory = await Scene(Pictures).play()
    assert trajectory.status is Status.FINISHED  # a scripted engine refuses nothing; those with a model do
