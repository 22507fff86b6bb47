"""Images in prompts of a model of transformers: each is computed once for given weights, alone, and put in the places of its tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from agentrl.core.images import ImageInput, PlacedImage, mutual_blocks, positions_of
from agentrl.core.model_shape import MutualLayers
from agentrl.engine.slots import Step

RowImages: TypeAlias = tuple[int, int, Sequence[PlacedImage]]
"""Number of a row, place of its first new token in the sequence, and the images of the sequence."""
KEPT = 2**26
"""Numbers of features that are kept for later prompts."""
LAYERS = "deepstack_features"
"""Field with features for some layers of the text part, as Qwen3-VL has them."""


class ImageFeatures:
    """Features of images, each computed alone, so that an image has the same in any company.

    The model's own forward pass puts them in their places: it asks its `get_image_features` for those of the images of a call, and is given
    what was kept.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: OrderedDict[str, Any] = OrderedDict()  # hash of the image -> output of the vision part
        self._now: list[Any] = []  # outputs for the images of the present call
        if (own := getattr(model.base_model, "get_image_features", None)) is not None:
            self._compute = own
            model.base_model.get_image_features = lambda *_, **__: _together(self._now)

    def forget(self) -> None:
        """Drop the features, which are those of older weights."""
        self._known.clear()

    def arguments(self, images: Sequence[RowImages]) -> dict[str, Any]:
        """Return what the next call of the model is given of the images that begin among the new tokens of its rows."""
        self._now = [self._features(each.image) for _, known, placed in images for each in placed if each.place >= known]
        # The model asks for features only where it is given pixels; these are never looked at.
        return {"pixel_values": torch.empty(0, device=self._model.device)} if self._now else {}

    def _features(self, image: ImageInput) -> Any:
        if image.key not in self._known:
            inputs = {name: torch.tensor(tensor.array, device=self._model.device) for name, tensor in image.tensors.items()}
            self._known[image.key] = self._compute(**inputs, return_dict=True)
        self._known.move_to_end(image.key)
        # The image of this call stays, however large it is.
        while len(self._known) > 1 and sum(map(_size_of, self._known.values())) > KEPT:
            self._known.popitem(last=False)
        return self._known[image.key]


def with_images(step: Step, images: Sequence[RowImages], mutual: MutualLayers) -> Step:
    """Return a step that knows the positions of tokens where these are not places, and which tokens attend to each other both ways.

    Args:
        step: The new tokens.
        images: Images of their sequences.
        mutual: Layers in which the tokens of an image attend to each other in both directions.
    """
    axes = max((len(each.image.positions) for _, _, placed in images for each in placed if each.image.positions is not None), default=0)
    if axes:
        step = replace(step, offsets=torch.from_numpy(_offsets(step, images, axes)))
    if mutual and any(each.place >= known for _, known, placed in images for each in placed):
        blocks = np.full((len(step.rows), step.keys), -1)
        for row, _, placed in images:
            blocks[row] = mutual_blocks(step.keys, placed)
        step = replace(step, blocks=torch.from_numpy(blocks), in_windows=mutual == "sliding")
    return step


def _offsets(step: Step, images: Sequence[RowImages], axes: int) -> Any:
    offsets = np.zeros((axes, len(step.rows), step.count), dtype=np.int64)
    for row, known, placed in images:
        length = placed[-1].end + 1  # the text behind the last image goes on from its first token
        whole = positions_of(length, placed, axes) - np.arange(length)
        offsets[:, row] = whole[:, np.minimum(known + np.arange(step.count), length - 1)]
    return offsets


def _together(outputs: Sequence[Any]) -> Any:
    """Return the outputs of the vision part for single images as one."""
    fields = {"pooler_output": _joined([output.pooler_output for output in outputs])}
    if getattr(outputs[0], LAYERS, None) is not None:
        fields[LAYERS] = [_joined(parts) for parts in zip(*(output[LAYERS] for output in outputs), strict=True)]
    return type(outputs[0])(**fields)


def _joined(parts: Sequence[Any]) -> Any:
    """Join tensors, or lists with a tensor for each image."""
    return torch.cat(list(parts)) if isinstance(parts[0], Tensor) else [each for part in parts for each in part]


def _size_of(output: Any) -> int:
    parts = [output.pooler_output, *(getattr(output, LAYERS, None) or ())]
    return sum(each.numel() for part in parts for each in ([part] if isinstance(part, Tensor) else part))
