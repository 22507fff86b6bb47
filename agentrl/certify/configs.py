"""The configuration of a model to certify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.core.tokenizers import quiet_transformers
from agentrl.weights.twin import model_class, twin_reads_images


def read_config(model: Path, *, trust_remote_code: bool = False) -> Any:
    """Return transformers' configuration of a model, from a directory or a ``config.json`` alone.

    It is that of the text part of a model with a vision part of which no twin can be built.

    Raises:
        ConfigError: If there is none, or transformers has no causal language model of this type.
    """
    from transformers import AutoConfig

    path = model / "config.json" if model.is_dir() else model
    remedy = "Name a directory of a Hugging Face model, or its config.json."
    if not path.is_file():
        raise ConfigError("MODEL", str(model), "holds no config.json", remedy)
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        with quiet_transformers():
            config = AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError("MODEL", str(model), f"its configuration cannot be read: {reason}", remedy) from error
    if twin_reads_images(config):
        return config
    text = config.get_text_config()
    model_class(text, name=str(settings.get("model_type", "")))
    return text
