"""Images as user code gives them, as texts that travel everywhere: paths stay paths, everything else becomes a data URL."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from agentrl.core.types import Message, Prompt

IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of the parts of a message that are images."""
MARK = "<image>"
"""Place of an image in a text of a data set, whatever placeholder the model has."""
FORMS = "give a path, a data URL, the bytes of a file, a PIL image or a NumPy array"
KINDS: Mapping[bytes, str] = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}
"""Kinds of image files, by their first bytes."""


def image_text(image: Any) -> str:
    """Return a path or a data URL for an image in any of the forms that user code may give; of equal texts given, the same object.

    Raises:
        ValueError: If it is none, with the problem.
    """
    if isinstance(image, Mapping):  # as data sets of Hugging Face have it
        image = image.get("bytes") or image.get("path")
    if isinstance(image, _SharedText):
        return image
    if isinstance(image, str | Path):
        return _shared(str(image))
    if isinstance(image, bytes | bytearray | memoryview):
        return data_url(bytes(image))
    if isinstance(image, np.ndarray):
        return _of_array(image)
    if hasattr(image, "getbands") and hasattr(image, "save"):
        return _of_pil(image)
    raise ValueError(f"is no image; {FORMS}")


def drawn_images(result: Any) -> Sequence[Any]:
    """Return the images of a result of user code if some of them are no text yet; none otherwise."""
    images = result.get("environment_images") if isinstance(result, Mapping) else getattr(result, "images", None)
    return images if isinstance(images, list | tuple) and not all(isinstance(image, str) for image in images) else ()


def with_texts(result: Any, texts: Sequence[str]) -> Any:
    """Return a result of user code with texts in the places of its images."""
    return {**result, "environment_images": texts} if isinstance(result, Mapping) else replace(result, images=texts)


def image_texts(images: Iterable[Any]) -> tuple[str, ...]:
    """Return a path or a data URL for each image; `ValueError` names the place of one that is none."""
    found = []
    for place, image in enumerate(images):
        try:
            found.append(image_text(image))
        except ValueError as error:
            raise ValueError(f"number {place} {error}") from error
    return tuple(found)


class _SharedText(str):
    """A text of which this process has one object while it is in use, however many episodes show the image."""

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> tuple[Any, ...]:
        # In another process it is an ordinary text: there it is in no table, and must not count as shared.
        return str, (str(self),)


_TEXTS: WeakValueDictionary[bytes, _SharedText] = WeakValueDictionary()  # by their hashes


def _shared(text: str) -> str:
    """Return the object that stands for all texts which are the same, so that members of a group hold the pixels of an image once."""
    # A long text as the key would be in memory a second time, so its hash is. Paths may hold lone surrogates.
    key = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
    if (found := _TEXTS.get(key)) is None:
        found = _TEXTS[key] = _SharedText(text)
    return found


def data_url(data: bytes) -> str:
    """Return a data URL of the bytes of a file."""
    kind = _kind_of(data)
    media = f"image/{kind}" if kind else "application/octet-stream"
    return f"data:{media};base64,{base64.b64encode(data).decode()}"


def file_suffix(data: bytes) -> str:
    """Return the end of the name of a file with these bytes, such as ``.png``."""
    return f".{_kind_of(data) or 'bin'}"


def _kind_of(data: bytes) -> str:
    return next((name for start, name in KINDS.items() if data.startswith(start)), "")


def lifted(prompt: Prompt, images: Iterable[Any]) -> tuple[Prompt, list[Any]]:
    """Return a prompt whose parts name no image themselves, and the images of all of its parts in their order.

    Parts without an image of their own take the next of `images`. Without such parts the images come first in the last message of the
    user; text that is no chat has placeholders of the model instead.

    Raises:
        ValueError: If there are more or fewer images than parts for them.
    """
    given = list(images)
    if isinstance(prompt, str):
        return prompt, given
    ordered: list[Any] = []
    waiting = iter(given)
    messages = [_lifted_message(message, waiting, ordered) for message in prompt]
    left = list(waiting)
    missing = sum(image is None for image in ordered)
    if missing or (ordered and left):
        problem = f"{missing} parts of messages have no image" if missing else f"{len(left)} images have no part"
        raise ValueError(f"the messages have {len(ordered)} parts for images and there are {len(given)} images beside them: {problem}")
    if left:
        place = max((place for place, message in enumerate(messages) if message.get("role") == "user"), default=len(messages) - 1)
        messages[place] = _with_images(messages[place], len(left))
    return messages, ordered or left


def with_marked_places(messages: Sequence[Message], count: int) -> list[Message]:
    """Return messages with parts for images where their texts have ``<image>``, as data sets write it.

    Messages of which none has it, or one has parts, stay as they are. So do those of the assistant.

    Raises:
        ValueError: If there are more or fewer of these marks than `count` images.
    """
    marked = [message.get("role") != "assistant" and isinstance(message.get("content"), str) for message in messages]
    found = sum(message["content"].count(MARK) for message, may in zip(messages, marked, strict=True) if may)
    if not count or not found or any(isinstance(message.get("content"), list | tuple) for message in messages):
        return list(messages)
    if found != count:
        raise ValueError(f"the texts have {found} marks {MARK} and there are {count} images")
    return [_divided(message) if may else message for message, may in zip(messages, marked, strict=True)]


def _divided(message: Message) -> Message:
    """Return a message whose marks are parts for images."""
    parts: list[Any] = []
    for number, text in enumerate(message["content"].split(MARK)):
        parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
    return {**message, "content": parts if any(part["type"] == "image" for part in parts) else message["content"]}


def without_images(prompt: Prompt, images: Iterable[Any]) -> tuple[Prompt, list[Any]]:
    """Return a prompt without its parts for images, and the images as `lifted` has them, for a model that reads text only.

    Raises:
        ValueError: If there are more or fewer images than parts for them.
    """
    _, ordered = lifted(prompt, images)
    return prompt if isinstance(prompt, str) else [_without_parts(message) for message in prompt], ordered


def _without_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [part for part in content if not _is_image(part)]} if isinstance(content, list | tuple) else message


def _lifted_message(message: Message, waiting: Any, ordered: list[Any]) -> Message:
    if isinstance(content := message.get("content"), str) or not any(map(_is_image, content or ())):
        return message
    parts: list[Any] = []
    for part in content:
        if _is_image(part):
            own = image_in(part)
            ordered.append(next(waiting, None) if own is None else own)
        parts.append({"type": "image"} if _is_image(part) else {"type": "text", "text": part} if isinstance(part, str) else part)
    return {**message, "content": parts}


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


def image_in(part: Mapping[str, Any]) -> Any:
    """Return the image that a part of a message holds, in any of the usual forms; `None` if it only says where one goes."""
    found = next((part[name] for name in ("image", "image_url", "url", "path") if part.get(name) is not None), None)
    if isinstance(found, Mapping) and "url" in found:
        return found["url"]
    return found


def _with_images(message: Message, count: int) -> Message:
    content = message.get("content")
    texts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    return {**message, "content": [*({"type": "image"} for _ in range(count)), *texts]}


def _of_array(array: np.ndarray[Any, Any]) -> str:
    shape = array.shape
    if array.dtype != np.uint8 or len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] not in (1, 3, 4)) or not array.size:
        problem = f"is an array of {array.dtype} with the shape {shape}, not of uint8 with height, width and 1, 3 or 4 channels"
        raise ValueError(f"{problem}; convert it")
    from PIL import Image

    return _of_pil(Image.fromarray(array[..., 0] if len(shape) == 3 and shape[2] == 1 else array))


def _of_pil(image: Any) -> str:
    if getattr(image, "n_frames", 1) > 1:
        raise ValueError(f"has {image.n_frames} frames; give one of them")
    if not image.width or not image.height:
        raise ValueError("has no pixels")
    file = io.BytesIO()
    try:
        image.save(file, format="PNG", compress_level=1)
    except OSError as error:  # a file that is cut off, or a mode that PNG does not have, such as CMYK
        raise ValueError(f"cannot be written as PNG: {error}; convert it to RGB") from error
    return data_url(file.getvalue())
