"""Images as a model reads them: tensors for its vision part, and tokens that stand for them in a prompt.

A prompt has two forms. The compact one, which chat templates write, has one placeholder token per image; the expanded one has all tokens
of an image in its place. Everything that counts or trains tokens has the expanded form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.core.errors import EngineError


@dataclass(frozen=True, slots=True)
class ImageTensor:
    """One of the arrays that a processor makes of an image."""

    array: npt.NDArray[Any]  # read-only
    axis: int  # along which arrays of several images are joined
    is_padded: bool = False  # arrays of other sizes are filled up with zeros behind, as the processor does with several images


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class ImageInput:
    """An image as a model reads it, made once by the model's own processor; all prompts with the image share it."""

    key: str  # hash of size and pixels
    data: bytes  # the file, PNG or as it was given
    token_ids: npt.NDArray[np.int32]  # [n] tokens that stand for it in an expanded prompt
    placeholder: int  # token that stands for it in a compact prompt
    tensors: Mapping[str, ImageTensor]  # by the name of the argument of the model
    positions: npt.NDArray[np.int64] | None = None  # [axes, n] of its tokens from that of the first; `None` if they are 0 to n - 1
    token_types: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)  # [n] arguments of the model that mark its tokens


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
    return {name: _joined([image.tensors[name] for image in images]) for name in names}


def _joined(parts: Sequence[ImageTensor]) -> npt.NDArray[Any]:
    arrays = [part.array for part in parts]
    if parts[0].is_padded:
        arrays = filled_up(arrays, parts[0].axis)
    return np.concatenate(arrays, axis=parts[0].axis)


def filled_up(arrays: Sequence[npt.NDArray[Any]], axis: int) -> list[npt.NDArray[Any]]:
    """Return arrays with zeros behind, so that all have the size of the largest in every direction but `axis`."""
    sizes = np.max([array.shape for array in arrays], axis=0)
    return [np.pad(a, [(0, 0 if at == axis else size - a.shape[at]) for at, size in enumerate(sizes)]) for a in arrays]


def positions_of(count: int, placed: Iterable[PlacedImage], axes: int = 1) -> npt.NDArray[np.int64]:
    """Return the positions of the tokens of an expanded prompt, for the rotary embedding. # [axes, count].

    They are 0 to count - 1, unless its images have positions in several dimensions (M-RoPE): text behind such an image goes on from the
    largest of them.

    Args:
        count: Tokens of the prompt, and of what follows it.
        placed: Its images, in their order.
        axes: Least number of axes.
    """
    images = [each for each in placed if each.image.positions is not None]
    own = [each.image.positions for each in images if each.image.positions is not None]
    found = np.tile(np.arange(count), (max([axes, *map(len, own)]), 1))
    for each, positions in zip(images, own, strict=True):
        found[:, each.place : each.end] = found[0, each.place] + positions
        found[:, each.end :] += positions.max() + 1 - positions.shape[1]
    return found


def token_types_of(count: int, placed: Iterable[PlacedImage]) -> dict[str, npt.NDArray[np.int64]]:
    """Return the arguments of a model that mark the tokens of images in a prompt, 0 for text # [count] each; none for most models."""
    found: dict[str, npt.NDArray[np.int64]] = {}
    for each in placed:
        for name, types in each.image.token_types.items():
            found.setdefault(name, np.zeros(count, dtype=np.int64))[each.place : each.end] = types
    return found


def mutual_blocks(count: int, placed: Iterable[PlacedImage]) -> npt.NDArray[np.int64]:
    """Return the number of the block of image tokens that each token attends to in both directions, -1 for none. # [count]."""
    marked = np.zeros(count, dtype=np.bool_)
    for types in token_types_of(count, placed).values():
        marked |= types == 1
    begins = marked & ~np.concatenate([[False], marked[:-1]])
    return np.where(marked, np.cumsum(begins) - 1, -1)


def image_arguments(width: int, rows: Sequence[Sequence[PlacedImage]]) -> dict[str, npt.NDArray[Any]]:
    """Return what a model is given beside the tokens of padded rows # [B, width], by the name of its argument; nothing without images.

    That are the tensors of their images; positions # [axes, B, width], where these have several dimensions; and marks of the tokens of
    images # [B, width], where the model attends to these in both directions.
    """
    arguments = joined_tensors([each.image for row in rows for each in row])
    axes = max((len(each.image.positions) for row in rows for each in row if each.image.positions is not None), default=0)
    if axes:
        arguments["position_ids"] = np.stack([positions_of(width, row, axes) for row in rows], axis=1)
    types = [token_types_of(width, row) for row in rows]
    for name in {name for own in types for name in own}:
        arguments[name] = np.stack([own.get(name, np.zeros(width, dtype=np.int64)) for own in types])
    return arguments


def locate(ids: Sequence[int], images: Sequence[ImageInput]) -> tuple[PlacedImage, ...]:
    """Return where the tokens of images are in an expanded prompt, in their order.

    Raises:
        ValueError: If those of an image are not in it.
    """
    tokens, placed, begin = np.asarray(ids), list[PlacedImage](), 0
    for number, image in enumerate(images):
        size = len(image.token_ids)
        places = np.flatnonzero(tokens[begin:] == image.token_ids[0]) + begin
        place = next((int(at) for at in places if np.array_equal(tokens[at : at + size], image.token_ids)), None)
        if place is None:
            raise ValueError(f"the tokens of image {number} are not in the prompt")
        placed.append(PlacedImage(place, image))
        begin = place + size
    return tuple(placed)
