"""From images as user code gives them to tensors and tokens, by the model's own processor, beside the event loop."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from agentrl.core.errors import EnvResultError
from agentrl.core.images import ImageInput, PlacedImage, expand
from agentrl.core.model_shape import local_config, prompt_placeholder, reads_images
from agentrl.env.images import image_text
from agentrl.env.plan import ImageConfig
from agentrl.rollout.image_processor import Processor
from agentrl.rollout.image_urls import ImageFetcher
from agentrl.rollout.lane import Lane

CACHE_BYTES = 2**28
"""Bytes of images and their tensors that are kept beyond the episodes which read them."""
MODES = ("RGB", "RGBA", "L", "LA", "P", "1")


class ImageReader:
    """Reads images for one model; everything heavy is loaded with the first image.

    Args:
        model: Hugging Face directory or hub name.
        config: Contents of the model's ``config.json``.
        limits: Number and size of images, and the hosts that they are fetched from.
        trust_remote_code: Allow the model's own Python code to run.
    """

    def __init__(self, model: str, config: Any, limits: ImageConfig, *, trust_remote_code: bool = False) -> None:
        self._model, self._config, self._limits, self._trusted = model, config, limits, trust_remote_code
        self._fetcher = ImageFetcher(limits.allow_image_urls)
        # Nothing is short, so that all work is on the thread.
        self._lane = Lane(short=-1)
        self._known: WeakValueDictionary[str, ImageInput] = WeakValueDictionary()  # by hash of the text that names it, and of its pixels
        self._kept: OrderedDict[str, ImageInput] = OrderedDict()
        self._kept_bytes = 0

    async def read(self, images: Sequence[Any]) -> list[ImageInput]:
        """Return images as the model reads them.

        Raises:
            EnvResultError: If one is no image, or too large.
            ConfigError: If the model's processor cannot be used.
        """
        return await self._lane.run(lambda: self.read_here(images), 0)

    def read_here(self, images: Sequence[Any]) -> list[ImageInput]:
        """As `read`, on the calling thread; no two threads may at once."""
        return [self._read(image, place) for place, image in enumerate(images)]

    def expand(self, compact: Sequence[int], images: Sequence[ImageInput], before: int = 0) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Return the expanded form of new tokens of a context that has `before` images already.

        Raises:
            EnvResultError: If there are more or fewer placeholders than images, or more images than a context may have.
        """
        limit = self._limits.max_images
        if before + len(images) > limit:
            raise EnvResultError(f"{before + len(images)} images are more than {limit} (--max-images)")
        try:
            return expand(compact, images, self.placeholder)
        except ValueError as error:
            raise EnvResultError(str(error)) from error

    def fetches(self, address: str) -> bool:
        """Return True if images at an address may be fetched."""
        return self._fetcher.allows(address)

    @property
    def placeholder(self) -> int:
        """The token that stands for an image in a compact prompt."""
        return prompt_placeholder(self._config)

    def _read(self, image: Any, place: int) -> ImageInput:
        try:
            text = image_text(image)
            name = _name_of(text)
            if (found := self._known.get(name)) is None:
                found = self._processed(image_bytes(text, self._fetcher))
                self._known[name] = found
        except (ValueError, OSError) as error:
            raise EnvResultError(f"image {place}: {error}") from error
        self._keep(found)
        return found

    def _processed(self, data: bytes) -> ImageInput:
        image = decoded(data, self._limits.max_image_pixels)
        # With the size, as the same bytes in another shape are another image.
        key = hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest()
        if (found := self._known.get(key)) is None:
            found = self._known[key] = self._processor.process(image, data, key)
        return found

    def _keep(self, image: ImageInput) -> None:
        if image.key not in self._kept:
            self._kept_bytes += _size_of(image)
        self._kept[image.key] = image
        self._kept.move_to_end(image.key)
        while len(self._kept) > 1 and self._kept_bytes > CACHE_BYTES:
            self._kept_bytes -= _size_of(self._kept.popitem(last=False)[1])

    @cached_property
    def _processor(self) -> Processor:
        return Processor(self._model, self._config, trust_remote_code=self._trusted)


def decoded(data: bytes, max_pixels: int) -> Any:
    """Return the bytes of an image file as a PIL image of the mode RGB, transparent places in white.

    Raises:
        ValueError: If they are no image, or one that is damaged, too large, animated, empty, or of a mode without three colours.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data))
        width, height = image.size
        if not width or not height:
            raise ValueError("the image has no pixels")
        # Before the pixels are read, which takes memory for all of them.
        if width * height > max_pixels:
            raise ValueError(f"the image has {width} x {height} pixels, more than {max_pixels:,} (--max-image-pixels)")
        if getattr(image, "n_frames", 1) > 1:
            raise ValueError(f"the image is animated: it has {getattr(image, 'n_frames', 1)} frames; give one of them")
        if image.mode not in MODES:
            raise ValueError(f"the image is of the mode {image.mode}; convert it to RGB")
        image.load()
    except UnidentifiedImageError as error:
        raise ValueError(f"the {len(data)} bytes are no image that can be read") from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # as PIL reports damaged files
        raise ValueError(f"the image is damaged: {error}") from error
    if image.mode in ("RGBA", "LA", "P"):
        layered = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layered.size, "white"), layered).convert("RGB")
    return image.convert("RGB")


def _name_of(text: str) -> str:
    """Return what tells an image apart by its text: a hash of a data URL; path, size and time of a file."""
    if not text.startswith("data:"):
        stat = Path(text).expanduser().stat() if "://" not in text else None
        text = f"{text}\n{stat and (stat.st_size, stat.st_mtime_ns)}"
    return "text-" + hashlib.sha256(text.encode()).hexdigest()


def image_bytes(text: str, fetcher: ImageFetcher) -> bytes:
    """Return the bytes of a data URL, of a file, or of what is at an address.

    Raises:
        ValueError: If it is a damaged data URL, or an address that may not be fetched or gives nothing.
        OSError: If there is no such file.
    """
    if text.startswith("data:"):
        head, _, body = text.partition(",")
        if not head.endswith(";base64"):
            raise ValueError("the data URL of an image must have base64 data")
        try:
            return base64.b64decode(body, validate=True)
        except binascii.Error as error:
            raise ValueError(f"the data URL of an image is damaged: {error}") from error
    if "://" in text:
        return fetcher.fetch(text)
    return Path(text).expanduser().read_bytes()


def _size_of(image: ImageInput) -> int:
    return len(image.data) + sum(tensor.array.nbytes for tensor in image.tensors.values())


def open_reader(model: str, limits: ImageConfig, *, trust_remote_code: bool = False) -> ImageReader | None:
    """Return the reader of images of a model; `None` for a model that reads text only."""
    path = local_config(model)
    if path is None or not reads_images(model):
        return None
    return ImageReader(model, json.loads(path.read_text(encoding="utf-8")), limits, trust_remote_code=trust_remote_code)
