"""The vision part of a twin, and images for it: made from a model's configuration alone, without its processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.core.images import ImageInput, ImageTensor, PlacedImage, joined_tensors
from agentrl.core.language_models import rope_index
from agentrl.core.model_shape import mutual_layers, placeholder_ids
from agentrl.core.types import ints
from agentrl.weights.twin_sizes import VOCABULARY, is_kept

WIDTH, INNER, LAYERS, HEADS = 32, 64, 2, 2
POOLED = 2
"""Patches of a side that become one token, where the configuration leaves it open."""
SIDES = ((4, 4), (4, 6))
"""Patches of the two images of a twin that takes images of any size, height and width."""
SQUARE = 4
"""Patches of a side of an image of a twin that takes images of one size."""
SMALLER: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "projection_dim"), WIDTH),
    "intermediate_size": INNER,
    **dict.fromkeys(("num_hidden_layers", "depth"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads"), HEADS),
    "head_dim": WIDTH // HEADS,
    "mlp_ratio": 2,
    "pooling_kernel_size": POOLED,
    **dict.fromkeys(("position_embedding_size", "num_position_embeddings"), 64),
    "deepstack_visual_indexes": list(range(LAYERS)),
    "fullatt_block_indexes": [LAYERS - 1],
}
"""Fields of a vision part that a twin has instead, if the model has them."""
OUTER: Mapping[str, Any] = {
    "mm_tokens_per_image": (SQUARE // POOLED) ** 2,
    "scale_factor": POOLED,
    "image_seq_length": SQUARE**2,
    "vision_feature_layer": -1,
    "audio_config": None,
}
"""Fields beside the parts that a twin has instead."""
LAST_TEXT = VOCABULARY - 8
"""Tokens of a twin from this one on may stand for images."""
PLAIN = frozenset({"pad_token_id", "eos_token_id", "bos_token_id"})
MARKS = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}
"""Type of a model whose tokens of images attend to each other in both directions -> its argument that marks them."""


def vision_twin_config(config: Any, text: Any) -> Any:
    """Return the configuration of the twin of a model that reads images, whose text part has the configuration `text`.

    Raises:
        KeyError: If the vision part is of a form that is not known here.
    """
    real: dict[str, Any] = config.to_dict()
    vision = dict(real["vision_config"])
    vision.pop("model_type")
    patch = _first(vision["patch_size"])
    fields = {name: value for name, value in vision.items() if is_kept(name)}
    fields |= {name: value for name, value in SMALLER.items() if fields.get(name) is not None}
    if "image_size" in fields:
        side = SQUARE * patch
        fields["image_size"] = [side, side] if isinstance(fields["image_size"], list | tuple) else side
    if "window_size" in fields:
        fields["window_size"] = 2 * POOLED * patch
    if "out_hidden_size" in fields:
        fields["out_hidden_size"] = text.hidden_size
    elif "embed_dim" in fields:  # Qwen2-VL calls the width behind its vision part so
        fields["hidden_size"] = text.hidden_size
    outer = {name: value for name, value in real.items() if not isinstance(value, dict) and name != "model_type" and is_kept(name)}
    outer |= {name: value for name, value in OUTER.items() if name in real} | _tokens(real)
    return type(config)(**{**outer, "text_config": text, "vision_config": type(config.vision_config)(**fields)})


def _first(value: Any) -> int:
    return int(value[0]) if isinstance(value, list | tuple) else int(value)


def _tokens(real: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of tokens for images and kin, each with one at the end of the vocabulary that trial rows do not use."""
    ends = ("_token_id", "_token_index")
    names = [name for name, value in real.items() if name.endswith(ends) and value is not None and name not in PLAIN]
    names.sort(key=lambda name: not name.startswith("image"))
    return {name: max(VOCABULARY - 2 - number, LAST_TEXT) for number, name in enumerate(names)}


@dataclass(frozen=True, slots=True)
class _Pixels:
    """Arguments of a vision part with one drawn image, and the axis along which those of several are joined."""

    arrays: Mapping[str, Tensor]
    axis: int = 0
    padded: tuple[str, ...] = ()  # arrays that are filled up to the size of the largest


def drawn_images(model: Any) -> list[ImageInput]:
    """Return two images as the twin of a model reads them; the vision part itself says how many tokens each has.

    Raises:
        ValueError: If the tokens of its images attend to each other in a way that is not known here.
    """
    return [_drawn(model, number, sides) for number, sides in enumerate(SIDES)]


@torch.no_grad()
def _drawn(model: Any, number: int, sides: tuple[int, int]) -> ImageInput:
    config = model.config
    pixels = _pixels(config, sides, torch.Generator().manual_seed(number))
    found = model.get_image_features(**pixels.arrays, return_dict=True).pooler_output
    parts: Sequence[Tensor] = [found] if isinstance(found, Tensor) else list(found)
    count = sum(part.numel() // part.shape[-1] for part in parts)
    mark = placeholder_ids(config)[0]
    ids = torch.full((1, count), mark)
    positions = None
    if (index := rope_index(config)) is not None:
        place, _ = index(input_ids=ids, mm_token_type_ids=torch.ones_like(ids), image_grid_thw=pixels.arrays["image_grid_thw"])
        positions = place[:, 0].numpy().astype(np.int64)
    kind = str(config.model_type)
    if mutual_layers(config) and kind not in MARKS:
        raise ValueError(f"models of the type {kind} mark the tokens of images in a way that is not known here")
    return ImageInput(
        key=f"{number:064x}",
        data=b"",
        token_ids=ints([mark] * count),
        placeholder=mark,
        tensors={name: ImageTensor(array.numpy(), pixels.axis, name in pixels.padded) for name, array in pixels.arrays.items()},
        positions=positions,
        token_types={MARKS[kind]: np.ones(count, dtype=np.int64)} if mutual_layers(config) else {},
    )


def _pixels(config: Any, sides: tuple[int, int], generator: torch.Generator) -> _Pixels:
    """Draw an image in the form in which the vision part takes it, by the names that its configuration has."""
    vision, outer = config.vision_config.to_dict(), config.to_dict()
    patch, (height, width) = _first(vision["patch_size"]), sides

    def noise(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    if "temporal_patch_size" in vision:
        values = noise(height * width, 3 * vision["temporal_patch_size"] * patch**2)
        return _Pixels({"pixel_values": values, "image_grid_thw": torch.tensor([[1, height, width]])})
    if "pooling_kernel_size" in vision:
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        places = torch.stack([columns, rows], dim=-1).reshape(1, -1, 2)
        empty = SIDES[-1][0] * SIDES[-1][1] - height * width  # images of all sizes have as many patches
        values = torch.nn.functional.pad(noise(1, height * width, 3 * patch**2), (0, 0, 0, empty))
        return _Pixels({"pixel_values": values, "image_position_ids": torch.nn.functional.pad(places, (0, 0, 0, empty), value=-1)})
    if vision["model_type"] == "pixtral":
        size = [height * patch, width * patch]
        return _Pixels({"pixel_values": noise(1, 3, *size), "image_sizes": torch.tensor([size])}, padded=("pixel_values",))
    side = _first(vision["image_size"])
    if "scale_factor" in outer:
        seen = torch.ones(1, 1, side, side, dtype=torch.int64)
        return _Pixels({"pixel_values": noise(1, 1, 3, side, side), "pixel_attention_mask": seen}, axis=1)
    return _Pixels({"pixel_values": noise(1, 3, side, side)})


def own_arguments(config: Any, tokens: Tensor, placed: Sequence[PlacedImage]) -> dict[str, Any]:
    """Return what a model itself takes of a prompt with images # [1, L].

    That are their tensors, and marks of their tokens, from which it finds positions and masks.
    """
    if not placed:
        return {}
    arguments: dict[str, Any] = {name: torch.from_numpy(array) for name, array in joined_tensors([each.image for each in placed]).items()}
    marks = (tokens == placeholder_ids(config)[0]).int()
    if mutual_layers(config):
        arguments[MARKS[config.model_type]] = marks
    elif placed[0].image.positions is not None:
        arguments["mm_token_type_ids"] = marks
    return arguments
