"""The tokenizer of a model, loaded where it is needed."""

from __future__ import annotations

from typing import Any

from agentrl.core.errors import ConfigError


def load_tokenizer(model: str, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a model, a Hugging Face directory or hub name.

    Raises:
        ConfigError: If there is none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(
            "--model", model, f"its tokenizer cannot be loaded: {reason}", "Give a Hugging Face directory or hub name."
        ) from error
