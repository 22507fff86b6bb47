"""Texts of single tokens, without the libraries that load models, and prompts split into messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.inspect.directory import RunDirectory

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
BROKEN = "\ufffd"
"""Text of bytes that are a part of a character only."""
MAX_JOINED = 8
"""Tokens that a character may be spread over."""


class TokenTexts:
    """The texts of a run's tokens, from the file of its tokenizer; nothing is downloaded.

    Args:
        directory: The run.
        model: Its initial model, "" for the bundled one; `None` if its settings cannot be read.
    """

    def __init__(self, directory: RunDirectory, model: str | None) -> None:
        self._directory, self._model = directory, model
        self._known: dict[int, str] = {}

    @property
    def available(self) -> bool:
        """True if there is a file of a tokenizer, which is not loaded for that."""
        return next(iter(self._files()), None) is not None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; `None` if the run's is not on this machine, or has no such file."""
        from tokenizers import Tokenizer

        for path in self._files():
            try:
                return Tokenizer.from_file(str(path))
            except Exception:  # tokenizers raises the base class; another file may do
                continue
        return None

    def _files(self) -> Iterable[Path]:
        folders = [self._directory.path / name for name in ("model", "best")]
        name = self._directory.named_model() if self._model is None else self._directory.tokenizer_path(self._model)
        if name:
            folders.insert(0, Path(name).expanduser())
            if (cached := _cached(name)) is not None:
                yield cached
        yield from (folder / TOKENIZER for folder in folders if (folder / TOKENIZER).is_file())

    def pieces(self, ids: Sequence[int]) -> list[str] | None:
        """Return the text of each token; where a character is spread over several, the first has it and the others are empty.

        `None` if there is no tokenizer.
        """
        if self.tokenizer is None:
            return None
        texts: list[str] = []
        while len(texts) < len(ids):
            start = len(texts)
            text, count = self._one(ids[start]), 1
            while BROKEN in text and count < min(MAX_JOINED, len(ids) - start):
                count += 1
                text = self._decode(ids[start : start + count])
            # Bytes that never become a character are shown token by token.
            if BROKEN in text:
                text, count = self._one(ids[start]), 1
            texts += [text, *[""] * (count - 1)]
        return texts

    def _one(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode([token])
        return self._known[token]

    def _decode(self, ids: Sequence[int]) -> str:
        try:
            return str(self.tokenizer.decode(list(ids), skip_special_tokens=False)) if self.tokenizer is not None else ""
        except (OverflowError, TypeError):  # a number that no token has
            return BROKEN


def _cached(name: str) -> Path | None:
    """Return the tokenizer of a model of the hub that was downloaded before."""
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(name, TOKENIZER)
    return Path(file) if isinstance(file, str) else None


FORMS = (
    re.compile(r"<\|im_start\|>(?P<role>\w+)\n(?P<text>.*?)(?:<\|im_end\|>\n?|\Z)", re.DOTALL),
    re.compile(r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n(?P<text>.*?)(?:<\|eot_id\|>|\Z)", re.DOTALL),
    re.compile(r"<start_of_turn>(?P<role>\w+)\n(?P<text>.*?)(?:<end_of_turn>\n?|\Z)", re.DOTALL),
    re.compile(
        r"<\|(?P<role>system|user|assistant|tool|developer)\|>\n?(?P<text>.*?)(?:<\|end\|>\n?|(?=<\|(?:system|user|assistant|tool)\|>)|\Z)",
        re.DOTALL,
    ),
)
"""Messages as common chat templates write them."""
LEADING = re.compile(r"(?:\s|<\|begin_of_text\|>|<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|<\|end\|>|<bos>|<s>)*")


def split_messages(text: str) -> list[dict[str, str]] | None:
    """Return the messages that a prompt consists of, for people; `None` unless all of it is in a form that is known.

    An empty message at the end, which asks the model to write, is left out.
    """
    for form in FORMS:
        start = LEADING.match(text).end()  # type: ignore[union-attr]
        messages, end = [], start
        for match in form.finditer(text, start):
            if match.start() != end:
                break
            messages.append({"role": match["role"], "text": match["text"]})
            end = match.end()
        if messages and end == len(text):
            return messages[:-1] if not messages[-1]["text"] and len(messages) > 1 else messages
    return None
