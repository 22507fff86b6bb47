"""Images as user code gives them: every form becomes a path or a data URL, and what is no image is refused by name."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agentrl import StepResult, Task
from agentrl.core.errors import DataError, EnvResultError
from agentrl.core.types import Message
from agentrl.env.images import image_text, lifted, with_marked_places
from agentrl.env.results import check_step
from agentrl.env.tasks import checked

PICTURE = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


def decoded(text: str) -> np.ndarray[Any, Any]:
    assert text.startswith("data:image/png;base64,")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text.partition(",")[2]))))


def test_arrays_and_pil_images_become_data_urls_with_the_same_pixels() -> None:
    for form in (PICTURE, Image.fromarray(PICTURE)):
        assert (decoded(image_text(form)) == PICTURE).all()
    assert (decoded(image_text(PICTURE[..., :1])) == PICTURE[..., 0]).all()


def test_paths_urls_and_bytes_stay_what_they_are() -> None:
    assert image_text("a.png") == image_text(Path("a.png")) == image_text({"bytes": None, "path": "a.png"}) == "a.png"
    assert image_text(b"\xff\xd8\xff1") == "data:image/jpeg;base64,/9j/MQ=="
    assert image_text("data:image/png;base64,AA==") == "data:image/png;base64,AA=="


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (object(), "is no image"),
        (PICTURE.astype(np.float32), "array of float32 with the shape (4, 6, 3)"),
        (PICTURE[:0], "shape (0, 6, 3)"),
        (PICTURE[..., :2], "shape (4, 6, 2)"),
        (Image.new("CMYK", (2, 2)), "convert it to RGB"),
        (Image.new("RGB", (0, 2)), "has no pixels"),
    ],
)
def test_what_is_no_image_is_refused_where_it_was_returned(image: Any, words: str) -> None:
    with pytest.raises(EnvResultError) as raised:
        check_step(StepResult(0.0, "Go on", images=["a.png", image]), "Env.step")
    assert "Env.step returned images" in str(raised.value)
    assert f"number 1 {words}" in str(raised.value) or words in str(raised.value)


def test_images_of_tasks_are_checked_with_the_id_of_the_task() -> None:
    (task,) = checked([Task("Look", images=(PICTURE,))], "file.py")  # type: ignore[arg-type]
    assert (decoded(task.images[0]) == PICTURE).all()
    with pytest.raises(DataError, match="odd"):
        list(checked([Task("Look", id="odd", images=(3,))], "file.py"))  # type: ignore[arg-type]


def test_images_go_where_the_parts_of_messages_are() -> None:
    own = {"type": "image_url", "image_url": {"url": "b.png"}}
    chat = [Message(role="user", content=[{"type": "text", "text": "one"}, {"type": "image"}, own, "two"])]
    messages, images = lifted(chat, ["a.png"])
    assert images == ["a.png", "b.png"]
    assert [part["type"] for part in messages[0]["content"]] == ["text", "image", "image", "text"]  # type: ignore[index, union-attr]


def test_without_parts_images_come_first_in_the_last_message_of_the_user() -> None:
    chat = [Message(role="user", content="one"), Message(role="assistant", content="ok"), Message(role="user", content="two")]
    messages, images = lifted(chat, ["a.png", "b.png"])
    assert images == ["a.png", "b.png"]
    assert messages[:2] == chat[:2]
    assert messages[2]["content"] == [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "two"}]  # type: ignore[index]


@pytest.mark.parametrize("count", [0, 2])
def test_more_or_fewer_images_than_parts_are_refused(count: int) -> None:
    chat = [Message(role="user", content=[{"type": "image"}])]
    with pytest.raises(ValueError, match=f"1 parts for images and there are {count} images"):
        lifted(chat, ["a.png"] * count)


def test_marks_in_texts_are_the_places_of_images() -> None:
    said = (("user", "<image>One<image>"), ("assistant", "an <image>"), ("user", "Two"))
    chat = [Message(role=role, content=content) for role, content in said]
    image, text = {"type": "image"}, {"type": "text", "text": "One"}
    assert with_marked_places(chat, 2) == [{"role": "user", "content": [image, text, image]}, *chat[1:]]
    assert with_marked_places(chat[1:], 2) == chat[1:]
    assert with_marked_places(chat, 0) == chat  # nothing but a text
    parts = [Message(role="user", content=[image]), *chat]
    assert with_marked_places(parts, 1) == parts
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"2 marks <image> and there are {count} images"):
            with_marked_places(chat, count)
