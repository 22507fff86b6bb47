"""Loading transformers models for training or as a frozen reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.learner.layout import MicroBatch
from agentrl.learner.settings import LearnerSettings


def load_model(settings: LearnerSettings, ds_config: dict[str, Any], *, trained: bool) -> Any:
    """A causal language model in the learner's data type.

    Args:
        settings: Which model, and how.
        ds_config: DeepSpeed's configuration; with ZeRO-3 every rank keeps only its part while loading.
        trained: Whether it will be trained: activations are then recomputed in the backward pass if asked.

    Returns:
        The model with dropout switched off, so that a second forward pass gives the same numbers as the first.
    """
    from transformers import AutoModelForCausalLM

    return _load(AutoModelForCausalLM, settings, ds_config, trained=trained)


def load_value_backbone(settings: LearnerSettings, ds_config: dict[str, Any]) -> Any:
    """The model without its output layer, to be trained as a critic; arguments as in `load_model`."""
    from transformers import AutoModel

    return _load(AutoModel, settings, ds_config, trained=True)


def _load(factory: Any, settings: LearnerSettings, ds_config: dict[str, Any], *, trained: bool) -> Any:
    with _partitioned_loading(ds_config), quiet_transformers():
        model = factory.from_pretrained(
            settings.model,
            dtype=torch.bfloat16 if settings.bf16 else torch.float32,
            attn_implementation=settings.learner.attn_implementation,
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,
        )
    disable_dropout(model)
    if trained and settings.learner.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0, in modules and in the functional calls that read it from attributes."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@contextmanager
def _partitioned_loading(ds_config: dict[str, Any]) -> Iterator[None]:
    """Tell transformers to partition weights while loading them, if ZeRO-3 is used."""
    if ds_config["zero_optimization"]["stage"] < 3:
        yield
        return
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    keep_alive = HfDeepSpeedConfig(ds_config)
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del keep_alive


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep progress bars and notes about weights that are not used out of the learner's output."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


class ValueModel(nn.Module):
    """Value of the state in which each action token is about to be sampled.

    The new output layer starts at 0, so that the first values are 0 whatever the seed.

    Args:
        model: A transformers model without output layer.
    """

    model: Any

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Linear(self.model.config.get_text_config().hidden_size, 1, bias=False, dtype=self.model.dtype)
        nn.init.zeros_(self.head.weight)

    def forward(self, micro: MicroBatch) -> Tensor:
        """Values of the action tokens of a micro-batch. # [a] float32."""
        hidden: Tensor = self.model(**micro.inputs(), use_cache=False).last_hidden_state
        values: Tensor = self.head(hidden.flatten(0, 1)[micro.select])[:, 0]
        return values.to(torch.float32)
