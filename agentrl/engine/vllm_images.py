"""Prompts with images for vLLM: its own processor makes the input of each image once, and prompts are put together of these."""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentrl.core.errors import EngineError
from agentrl.core.images import ImageInput, check_agreement
from agentrl.core.protocols import GenerationRequest
from agentrl.rollout.images import CACHE_BYTES, decoded

MODALITY = "image"


@dataclass(frozen=True, slots=True)
class _Made:
    """An image as vLLM's processor made it."""

    token_ids: list[int]  # of a prompt of this image alone, expanded
    item: Any  # arguments of the model
    hash: str
    place: Any  # `PlaceholderRange` in that prompt
    num_bytes: int


class ImagePrompts:
    """Makes inputs of prompts with images; each image is processed once, while the latest ones fit into `CACHE_BYTES`.

    vLLM is never given an expanded prompt to expand: it would do so without an error. It gets the placeholder of one image, and what it
    makes of that is compared with the tokens which the learner trains on.

    Args:
        renderer: The part of vLLM that processes images.
        problem: Why it cannot compute images as the learner does; "" if it can.
    """

    def __init__(self, renderer: Any, problem: str = "") -> None:
        self._renderer = renderer  # not all of vLLM, whose model would outlive the engine's end
        self._problem = problem
        self._made: OrderedDict[str, asyncio.Task[_Made]] = OrderedDict()  # by the hash of the pixels

    async def prompt(self, request: GenerationRequest, salt: Mapping[str, str]) -> Any:
        """Return vLLM's input for a request.

        Raises:
            EngineError: If vLLM expands an image to other tokens than those of the request, which the learner trains on, or computes the
                model in another way.
        """
        if self._problem:
            raise EngineError(f"request {request.request_id}: {self._problem}")
        made = [await self._image(each.image) for each in request.placed]
        for each, one in zip(request.placed, made, strict=True):
            check_agreement(f"request {request.request_id}", one.token_ids, each.image.token_ids.tolist())
        places = [replace(one.place, offset=each.place + one.place.offset) for each, one in zip(request.placed, made, strict=True)]
        self._forget()
        return {
            "type": "multimodal",
            "prompt_token_ids": request.prompt_ids.tolist(),
            "mm_kwargs": {MODALITY: [one.item for one in made]},
            "mm_hashes": {MODALITY: [one.hash for one in made]},
            "mm_placeholders": {MODALITY: places},
            **salt,
        }

    async def _image(self, image: ImageInput) -> _Made:
        """Return an image as vLLM's processor makes it; requests that need it at the same time share the work."""
        # A failure is not kept: the next request with the image tries again.
        if (task := self._made.get(image.key)) is None or (task.done() and not _succeeded(task)):
            task = self._made[image.key] = asyncio.create_task(self._process(image), name=f"image {image.key[:8]}")
        self._made.move_to_end(image.key)
        return await asyncio.shield(task)  # another request may wait for it when this one is cancelled

    async def _process(self, image: ImageInput) -> _Made:
        # Without a limit, because the image has passed those of its episode.
        picture = await asyncio.to_thread(decoded, image.data, sys.maxsize)
        data = {"multi_modal_data": {MODALITY: [picture]}, "multi_modal_uuids": {MODALITY: [image.key]}}
        (found,) = await self._renderer.render_cmpl_async([{"prompt_token_ids": [image.placeholder], **data}])
        items, places = found["mm_kwargs"][MODALITY], found["mm_placeholders"][MODALITY]
        size = len(image.data) + sum(tensor.array.nbytes for tensor in image.tensors.values())
        return _Made(found["prompt_token_ids"], items[0], found["mm_hashes"][MODALITY][0], places[0], size)

    def _forget(self) -> None:
        """Let go of the images that were not used for the longest time."""
        sizes = {key: task.result().num_bytes for key, task in self._made.items() if _succeeded(task)}
        total = sum(sizes.values())
        for key, size in sizes.items():
            if total <= CACHE_BYTES:
                return
            del self._made[key]
            total -= size


def _succeeded(task: asyncio.Task[_Made]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
