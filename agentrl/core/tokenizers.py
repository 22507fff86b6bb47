"""The tokenizer of a model, loaded where it is needed, and transformers without its notes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.core.errors import ConfigError


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep progress bars and notes about weights that are not used out of the output."""
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


def load_tokenizer(model: str, *, trust_remote_code: bool = False, flag: str = "--model") -> Any:
    """Return the tokenizer of a model, a Hugging Face directory or hub name that `flag` gave.

    Raises:
        ConfigError: If there is none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    remedy, empty = "Give a Hugging Face directory or hub name.", "has no files of a tokenizer"
    try:
        with quiet_transformers():  # which complains of the default configuration of some families, whatever the model's own says
            tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        problem = empty if "instantiate the backend tokenizer" in reason else f"its tokenizer cannot be loaded: {reason}"
        raise ConfigError(flag, model, problem, remedy) from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # transformers makes an empty one for some types of model
        raise ConfigError(flag, model, empty, remedy)
    if getattr(tokenizer, "chat_template", None) is None:
        tokenizer.chat_template = _template_of_processor(model)
    return tokenizer


def _template_of_processor(model: str) -> str | None:
    """Return the chat template that stands in a file of a processor's, as older models that read images have it; `None` without one."""
    from transformers.utils import cached_file

    quiet = ("missing_entries", "connection_errors", "gated_repo")
    found = cached_file(model, "chat_template.json", **{f"_raise_exceptions_for_{name}": False for name in quiet})
    return None if found is None else json.loads(Path(found).read_text(encoding="utf-8")).get("chat_template")


def check_teacher(teacher: str, model: str, *, trust_remote_code: bool = False) -> None:
    """Make sure that a teacher has the tokenizer of the model that it teaches, since it scores the tokens that the model sampled.

    Raises:
        ConfigError: If it has none, or another one.
    """
    mine = load_tokenizer(model, trust_remote_code=trust_remote_code).get_vocab()
    theirs = load_tokenizer(teacher, trust_remote_code=trust_remote_code, flag="--teacher").get_vocab()
    if mine != theirs:
        other = sum(theirs.get(token) != number for token, number in mine.items())
        problem = f"has another tokenizer than the model: {other:,} of {len(mine):,} tokens are not the same"
        raise ConfigError("--teacher", teacher, problem, "Choose a model of the same family.")
