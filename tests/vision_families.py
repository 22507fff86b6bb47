"""Small models with random weights of families that read images, each with its tokenizer and its processor."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.utils import is_torchvision_available

from agentrl.core.images import ImageInput, joined_tensors
from agentrl.core.model_shape import placeholder_ids
from agentrl.rollout.images import ImageReader
from examples.vision_model.model import CHAT_TEMPLATE

PATCH = 14
TEXT: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": True,
}
"""Text part; heads of 32, because vLLM takes no smaller ones on a CPU."""
VISION: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": PATCH,
    "initializer_range": 0.15,
}


def _tokenizer(*tokens: str, **named: str) -> Any:
    """Return the tokenizer of the bundled chat model with tokens of images; `named` are those that a processor asks for by name."""
    from transformers import AutoTokenizer

    from agentrl.assets import tiny_model_path

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    tokenizer.add_special_tokens({"extra_special_tokens": [*tokenizer.extra_special_tokens, *tokens, *named.values()]})
    if named:
        tokenizer._set_model_specific_special_tokens(special_tokens=named)
    return tokenizer


def _image_processor(folder: str, name: str, **settings: Any) -> Any:
    module = importlib.import_module(f"transformers.models.{folder}.image_processing_pil_{folder}")
    return getattr(module, name)(**settings)


def _text(tokenizer: Any, **changes: Any) -> dict[str, Any]:
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    return {**TEXT, "vocab_size": len(tokenizer), **ids, **changes}


def _ids(tokenizer: Any, **tokens: str) -> dict[str, int]:
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}


def _qwen(kind: str) -> tuple[Any, Any, Any]:
    tokenizer = _tokenizer("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    images = _image_processor(
        "qwen2_vl", "Qwen2VLImageProcessorPil", min_pixels=28 * 28, max_pixels=84 * 84, patch_size=PATCH, merge_size=2
    )
    common = {"spatial_merge_size": 2, "patch_size": PATCH, "initializer_range": 0.15, "depth": 2, "num_heads": 2}
    sizes = {
        "qwen2_vl": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        "qwen2_5_vl": {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "window_size": 56, "fullatt_block_indexes": [1]},
        "qwen3_vl": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 64,
        },
    }[kind]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6], "mrope_interleaved": kind == "qwen3_vl"}
    config = {
        "text_config": _text(tokenizer, rope_parameters=rope),
        "vision_config": {**common, **sizes},
        "tie_word_embeddings": True,
        **_ids(tokenizer, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>"),
        **_ids(tokenizer, vision_start_token_id="<|vision_start|>", vision_end_token_id="<|vision_end|>"),
    }
    return tokenizer, images, config


def _gemma3() -> tuple[Any, Any, Any]:
    named = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = _tokenizer(**named)
    tokenizer.add_tokens([count * "\n" for count in range(1, 5)])  # as Gemma has them, so that images beside each other share one
    images = _image_processor("gemma3", "Gemma3ImageProcessorPil", size={"height": 56, "width": 56})
    kinds = ["sliding_attention", "full_attention"]
    config = {
        "text_config": _text(tokenizer, sliding_window=24, layer_types=kinds, query_pre_attn_scalar=32),
        "vision_config": {**VISION, "image_size": 56},
        "mm_tokens_per_image": 4,
        **_ids(tokenizer, image_token_index=named["image_token"], boi_token_index=named["boi_token"], eoi_token_index=named["eoi_token"]),
    }
    return tokenizer, images, config


def _gemma4() -> tuple[Any, Any, Any]:
    named = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
    named |= {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
    tokenizer = _tokenizer("<|video|>", **named)
    images = _image_processor("gemma4", "Gemma4ImageProcessorPil", patch_size=PATCH, max_soft_tokens=70, pooling_kernel_size=2)
    kinds = ["sliding_attention", "full_attention"]
    text = _text(tokenizer, sliding_window=24, layer_types=kinds, use_bidirectional_attention="vision", hidden_size_per_layer_input=0)
    text |= {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": len(tokenizer), "global_head_dim": 32}
    config = {
        "text_config": text,
        "vision_config": {**VISION, "num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2, "position_embedding_size": 64},
        "audio_config": None,
        **_ids(tokenizer, image_token_id=named["image_token"], boi_token_id=named["boi_token"], eoi_token_id=named["eoi_token"]),
        **_ids(tokenizer, video_token_id="<|video|>", audio_token_id=named["audio_token"], boa_token_id=named["boa_token"]),
    }
    return tokenizer, images, config


def _llava() -> tuple[Any, Any, Any]:
    tokenizer = _tokenizer("<image>")
    size = {"height": 56, "width": 56}
    images = _image_processor("clip", "CLIPImageProcessorPil", size={"shortest_edge": 56}, crop_size=size)
    vision = {**VISION, "model_type": "clip_vision_model", "image_size": 56, "projection_dim": 32}
    config = {
        "text_config": {**_text(tokenizer), "model_type": "llama"},
        "vision_config": vision,
        **_ids(tokenizer, image_token_index="<image>"),
        "vision_feature_layer": -1,
        "image_seq_length": 16,
    }
    return tokenizer, images, config


def _internvl() -> tuple[Any, Any, Any]:
    named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    tokenizer = _tokenizer(**named)
    images = _image_processor(
        "got_ocr2", "GotOcr2ImageProcessorPil", size={"height": 56, "width": 56}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    config = {
        "text_config": {**_text(tokenizer), "model_type": "qwen2"},
        "vision_config": {**VISION, "image_size": [56, 56], "patch_size": [PATCH, PATCH]},
        **_ids(tokenizer, image_token_id="<IMG_CONTEXT>"),
        "image_seq_length": 4,
        "downsample_ratio": 0.5,
    }
    return tokenizer, images, config


def _pixtral() -> tuple[Any, Any, Any]:
    tokenizer = _tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    images = _image_processor(
        "pixtral", "PixtralImageProcessorPil", size={"longest_edge": 70}, patch_size={"height": PATCH, "width": PATCH}
    )
    config = {
        "text_config": {**_text(tokenizer), "model_type": "mistral", "sliding_window": None},
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 70},
        **_ids(tokenizer, image_token_index="[IMG]"),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }
    return tokenizer, images, config


MAKERS: Mapping[str, Callable[[], tuple[Any, Any, Any]]] = {
    "qwen2_vl": lambda: _qwen("qwen2_vl"),
    "qwen2_5_vl": lambda: _qwen("qwen2_5_vl"),
    "qwen3_vl": lambda: _qwen("qwen3_vl"),
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "llava": _llava,
    "internvl": _internvl,
    "pixtral": _pixtral,
}
"""Families beside Idefics3, whose small model is the fixture `vision_model`."""
CLASSES = {"pixtral": "llava"}
"""Families whose model is one of another type."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"image_seq_length": 4},
    "gemma4": {"image_seq_length": 4},
    "llava": {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    "internvl": {"image_seq_length": 4},
    "pixtral": {"patch_size": PATCH},
}
"""Settings of processors, as their files have them."""
PROCESSORS = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "gemma3": "Gemma3Processor",
    "gemma4": "Gemma4Processor",
    "llava": "LlavaProcessor",
    "internvl": "InternVLProcessor",
    "pixtral": "PixtralProcessor",
}


def make_family(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a small model of a family, its tokenizer and the files of its processor; return the folder."""
    import json

    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    tokenizer, images, settings = MAKERS[name]()
    config = CONFIG_MAPPING[CLASSES.get(name, name)](**settings)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<image>", PLACEHOLDERS[name])
    tokenizer.save_pretrained(folder)
    images.save_pretrained(folder)
    words = {"processor_class": PROCESSORS[name], **SETTINGS.get(name, {})}
    (folder / "processor_config.json").write_text(json.dumps(words), encoding="utf-8")
    return folder


PLACEHOLDERS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "<|vision_start|><|image_pad|><|vision_end|>"),
    "gemma3": "<start_of_image>",
    "gemma4": "<|image|>",
    "llava": "<image>",
    "internvl": "<IMG_CONTEXT>",
    "pixtral": "[IMG]",
}
"""Text of an image in a chat template."""

WHY = "transformers has no processor of this family without torchvision"
REQUIRED = ("qwen2_5_vl", "gemma3")
"""Families that every run of the tests tries."""
NEED_TORCHVISION = ("gemma4", "pixtral")


def _marks(name: str) -> list[pytest.MarkDecorator]:
    missing = pytest.mark.skipif(not is_torchvision_available(), reason=WHY)
    return [pytest.mark.slow] * (name not in REQUIRED) + [missing] * (name in NEED_TORCHVISION)


FAMILIES = [pytest.param(name, marks=_marks(name)) for name in MAKERS]
"""Parameters of tests: most families are slow ones, some need torchvision."""


def own_arguments(reader: ImageReader, images: Sequence[ImageInput], tokens: Tensor) -> dict[str, Any]:
    """Return what the model itself takes of a row with images: tensors, and marks of tokens, from which it finds positions and masks."""
    arguments: dict[str, Any] = {name: torch.from_numpy(array) for name, array in joined_tensors(images).items()}
    kind = reader._config["model_type"]
    if images and kind.startswith(("qwen", "gemma")):
        marks = (tokens == placeholder_ids(reader._config)[0]).int()
        arguments["token_type_ids" if kind == "gemma3" else "mm_token_type_ids"] = marks
    return arguments
