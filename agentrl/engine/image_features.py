"""Images in prompts of a model of transformers: each is computed once for given weights, alone, and put in the places of its tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from agentrl.config.model_shape import placeholder_ids
from agentrl.core.images import ImageInput, PlacedImage

RowImages: TypeAlias = tuple[int, int, Sequence[PlacedImage]]
"""Number of a row, place of its first new token in the sequence, and the images of the sequence."""
KEPT = 2**26
"""Numbers of features that are kept for later prompts."""


class ImageFeatures:
    """Features of images, each computed alone, so that an image has the same in any company."""

    def __init__(self, model: Any) -> None:
        self._model, self._placeholders = model, placeholder_ids(model.config)
        self._known: OrderedDict[str, Tensor] = OrderedDict()  # hash of the image -> features # [n, hidden]

    def forget(self) -> None:
        """Drop the features, which are those of older weights."""
        self._known.clear()

    def embedded(self, ids: Tensor, images: Sequence[RowImages]) -> Tensor:
        """Return the embeddings of new tokens # [B, n, hidden], features in the places of images."""
        embeddings: Tensor = self._model.get_input_embeddings()(ids).clone()
        for row, known, placed in images:
            for each in placed:
                places = each.place - known + np.flatnonzero(each.image.token_ids == self._placeholders[0])
                new = np.flatnonzero((places >= 0) & (places < ids.shape[1]))
                if len(new):
                    embeddings[row, places[new]] = self._features(each.image)[new].to(embeddings.dtype)
        return embeddings

    def _features(self, image: ImageInput) -> Tensor:
        if image.key not in self._known:
            inputs = {name: torch.tensor(tensor.array, device=self._model.device) for name, tensor in image.tensors.items()}
            found = self._model.get_image_features(**inputs, return_dict=True).pooler_output
            parts = [found] if isinstance(found, Tensor) else list(found)
            self._known[image.key] = torch.cat([part.flatten(0, -2) for part in parts])
        self._known.move_to_end(image.key)
        while len(self._known) > 1 and sum(features.numel() for features in self._known.values()) > KEPT:
            self._known.popitem(last=False)
        return self._known[image.key]
