"""Language models of transformers, those that read images among them: their class, and attention of their text part alone."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def language_model(model: str, *, trust_remote_code: bool = False) -> Any:
    """Return the class of transformers that loads a language model, a Hugging Face directory or hub name, with its vision part if any."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    reads_images = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if reads_images and type(config) not in AutoModelForCausalLM._model_mapping else AutoModelForCausalLM


def sequence_classifier(model: str, *, trust_remote_code: bool = False) -> Any:
    """Return the class that loads a model with a head for scores.

    A family that reads images gets a class made here, where transformers has none. Its head reads the last token that is no padding.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, AutoModelForSequenceClassification
    from transformers.modeling_layers import GenericForSequenceClassification

    kind = type(AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code))
    if kind in AutoModelForSequenceClassification._model_mapping or kind not in AutoModelForImageTextToText._model_mapping:
        return AutoModelForSequenceClassification
    # The base of a family's bare model is the class that loads and initialises all models of the family.
    family = AutoModel._model_mapping[kind].__bases__[0]
    name = family.__name__.replace("PreTrainedModel", "ForSequenceClassification")
    return type(name, (GenericForSequenceClassification, family), {})


def _token_classifier(model: str, *, trust_remote_code: bool = False) -> Any:
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification


CLASSES: Mapping[str, Callable[..., Any]] = {"CAUSAL_LM": language_model, "SEQ_CLS": sequence_classifier, "TOKEN_CLS": _token_classifier}
"""Task, as peft writes it into an adapter's settings -> function that finds the class of a model, given as for `language_model`."""


LABELS = {"SEQ_CLS": 1, "TOKEN_CLS": 2}
"""Outputs of the heads of reward models and process reward models, by task."""


def set_text_attention(model: Any, name: str) -> None:
    """Have a model compute attention of text by the function that is registered with transformers under `name`.

    A vision part keeps its own: its tokens see each other in both directions.
    """
    parts = {part for part in model.config.sub_configs if hasattr(model.config, part)}
    model.set_attn_implementation({"text_config": name} if "text_config" in parts else name)


def rope_index(config: Any) -> Callable[..., Any] | None:
    """Return the function of a model's class that finds positions in several dimensions (M-RoPE) for the tokens of a prompt with images.

    `None` for a model whose tokens have one position each. The model itself is not made: the function reads the configuration only, which
    is transformers' own or the contents of a ``config.json``.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModel

    own = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)) if isinstance(config, Mapping) else config
    kind = AutoModel._model_mapping[type(own)]
    if not hasattr(kind, "get_rope_index"):
        return None
    shell = kind.__new__(kind)
    torch.nn.Module.__init__(shell)
    shell.config = own
    return functools.partial(kind.get_rope_index, shell)


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
