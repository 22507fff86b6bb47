"""The tiny vision model before its training: Idefics3, the architecture of SmolVLM, with 0.65 million parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from agentrl.assets import tiny_model_path

SIDE, PATCH, SCALE = 64, 8, 4
"""Pixels of a side of a picture and of its patches, and patches of a side that become one token."""
LAYERS, VISION_LAYERS = 2, 1
"""Layers of the text part and of the vision part: the picture is small, and the connector sees all patches of a token at once."""
TOKENS = (SIDE // PATCH // SCALE) ** 2
SPECIAL = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
WORDS = ["circle", "square", "cross", "colour", "Where", "How", "many"]
"""Words of questions about pictures that are one token each; the bundled chat model has two to five for each."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer() -> Any:
    """Return the tokenizer of the bundled chat model with the tokens of images and some words."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    tokenizer.add_special_tokens({"extra_special_tokens": [*tokenizer.extra_special_tokens, *SPECIAL]})
    tokenizer.add_tokens(WORDS)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_config(tokenizer: Any, *, layers: int = LAYERS) -> Idefics3Config:
    """Return the configuration; `layers` are those of the text part."""
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        **ids,
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": VISION_LAYERS,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
        "initializer_range": 0.05,
    }
    image = tokenizer.convert_tokens_to_ids("<image>")
    return Idefics3Config(text_config=text, vision_config=vision, scale_factor=SCALE, image_token_id=image, tie_word_embeddings=True, **ids)


def save_new_model(folder: str | Path, *, seed: int = 0, layers: int = LAYERS) -> Path:
    """Write a model of random weights, its tokenizer and its processor; return the folder."""
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    model = Idefics3ForConditionalGeneration(make_config(tokenizer, layers=layers))
    images = Idefics3ImageProcessorPil(
        do_image_splitting=False, size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}, do_rescale=True, do_normalize=True
    )
    model.save_pretrained(folder)
    Idefics3Processor(images, tokenizer, image_seq_len=TOKENS, chat_template=CHAT_TEMPLATE).save_pretrained(folder)
    return Path(folder)
