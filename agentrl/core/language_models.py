"""Language models of transformers, those that read images among them: their class, and attention of their text part alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any


def language_model(model: str, *, trust_remote_code: bool = False) -> Any:
    """Return the class of transformers that loads a language model, a Hugging Face directory or hub name, with its vision part if any."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    reads_images = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if reads_images and type(config) not in AutoModelForCausalLM._model_mapping else AutoModelForCausalLM


def set_text_attention(model: Any, name: str) -> None:
    """Have a model compute attention of text by the function that is registered with transformers under `name`.

    A vision part keeps its own: its tokens see each other in both directions.
    """
    parts = {part for part in model.config.sub_configs if hasattr(model.config, part)}
    model.set_attn_implementation({"text_config": name} if "text_config" in parts else name)


PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.json")
"""Files of a processor, beside those of its tokenizer."""


def copy_processor(model: Any, folder: Path) -> None:
    """Copy the files of the processor of a model that reads images into a folder; nothing for a model of text."""
    if getattr(model.config, "vision_config", None) is None:
        return
    from transformers.utils import cached_file

    for name in PROCESSOR_FILES:
        found = cached_file(model.name_or_path, name, _raise_exceptions_for_missing_entries=False)
        if found is not None:
            shutil.copyfile(found, folder / name)
