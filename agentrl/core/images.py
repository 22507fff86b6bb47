"""Images as a model reads them: tensors for its vision part, and tokens that stand for them in a prompt.

A prompt has two forms. The compact one, which chat templates write, has one placeholder token per image; the expanded one has all tokens
of an image in its place. Everything that counts or trains tokens has the expanded form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.core.errors import EngineError


@dataclass(frozen=True, slots=True)
class ImageTensor:
    """One of the arrays that a processor makes of an image."""

    array: npt.NDArray[Any]  # read-only
    axis: int  # along which arrays of several images are joined


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class ImageInput:
    """An image as a model reads it, made once by the model's own processor; all prompts with the image share it."""

    key: str  # hash of size and pixels
    data: bytes  # the file, PNG or as it was given
    token_ids: npt.NDArray[np.int32]  # [n] tokens that stand for it in an expanded prompt
    placeholder: int  # token that stands for it in a compact prompt
    tensors: Mapping[str, ImageTensor]  # by the name of the argument of the model


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image in an expanded prompt."""

    place: int  # of the first of its tokens
    image: ImageInput

    @property
    def end(self) -> int:
        """Place behind its last token."""
        return self.place + len(self.image.token_ids)

    def moved(self, by: int) -> PlacedImage:
        """Return the same image in a prompt that begins `by` tokens earlier."""
        return PlacedImage(self.place + by, self.image)


def expand(compact: Sequence[int], images: Sequence[ImageInput], placeholder: int) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """Return the expanded form of a compact prompt, and where its images are.

    Raises:
        ValueError: If there are more or fewer placeholders than images.
    """
    places = [place for place, token in enumerate(compact) if token == placeholder]
    if len(places) != len(images):
        raise ValueError(f"the prompt has {len(places)} placeholders of images, and there are {len(images)} images")
    ids: list[int] = []
    placed: list[PlacedImage] = []
    begin = 0
    for place, image in zip(places, images, strict=True):
        ids += compact[begin:place]
        placed.append(PlacedImage(len(ids), image))
        ids += image.token_ids.tolist()
        begin = place + 1
    return [*ids, *compact[begin:]], tuple(placed)


def compacted(expanded: Sequence[int], placed: Iterable[PlacedImage]) -> list[int]:
    """Return the compact form of an expanded prompt."""
    ids: list[int] = []
    begin = 0
    for each in placed:
        ids += [*expanded[begin : each.place], each.image.placeholder]
        begin = each.end
    return [*ids, *expanded[begin:]]


def check_agreement(name: str, used: Sequence[int], expanded: Sequence[int]) -> None:
    """Raise `EngineError` if an engine uses other tokens for an image than the learner will train on."""
    if list(used) != list(expanded):
        problem = f"the engine made {len(used)} tokens of an image of which the learner has {len(expanded)}"
        raise EngineError(f"{name}: {problem}; the two would not compute the same log-probabilities")


def check_places(name: str, prompt_ids: npt.NDArray[np.int32], placed: Sequence[PlacedImage], placeholder_ids: Iterable[int]) -> None:
    """Raise `EngineError` unless the tokens of each image are where it is said to be, and every token for pixels is one of an image."""
    inside = np.zeros(len(prompt_ids), dtype=np.bool_)
    for each in placed:
        if not np.array_equal(prompt_ids[each.place : each.end], each.image.token_ids):
            raise EngineError(f"{name}: the tokens of an image are not at place {each.place} of the prompt, which has {len(prompt_ids)}")
        inside[each.place : each.end] = True
    stray = int((np.isin(prompt_ids, list(placeholder_ids)) & ~inside).sum())
    if stray:
        raise EngineError(f"{name}: {stray} placeholders of images in the prompt have no image, beside {len(placed)} that have one")


def joined_tensors(images: Sequence[ImageInput]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of several images as one of each name; nothing for no images.

    Raises:
        ValueError: If arrays of two images do not fit together.
    """
    names = images[0].tensors if images else {}
    return {name: np.concatenate([image.tensors[name].array for image in images], axis=names[name].axis) for name in names}
