"""The chat codec of a model from its tokenizer's files, where possible without transformers and so without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agentrl.check.findings import CheckSettings
from agentrl.core.tokenizers import load_tokenizer
from agentrl.engine.parsers import fit_parser, is_fitted_by_vllm
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.codecs import make_codec

FILES = ("tokenizer.json", "tokenizer_config.json")


class FileTokenizer:
    """The methods of a tokenizer that `ChatCodec` calls, from the files of a directory; the chat template may be a file of its own."""

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer

        self.name_or_path = str(directory)
        self._tokenizer = Tokenizer.from_file(str(directory / FILES[0]))
        config = json.loads((directory / FILES[1]).read_text(encoding="utf-8"))
        template = directory / "chat_template.jinja"
        self.chat_template: Any = template.read_text(encoding="utf-8") if template.is_file() else config.get("chat_template")
        tokens = {key: value for key, value in config.items() if key.endswith("_token") and value}
        self._names = {key: str(value["content"] if isinstance(value, Mapping) else value) for key, value in tokens.items()}
        self.added_tokens_decoder: Mapping[int, Any] = self._tokenizer.get_added_tokens_decoder()
        self.all_special_tokens = list(dict.fromkeys(self._names.values()))

    @staticmethod
    def can_read(directory: Path) -> bool:
        """Return True if the directory holds the needed files; several named templates are left to transformers."""
        if not all((directory / name).is_file() for name in FILES):
            return False
        config = json.loads((directory / FILES[1]).read_text(encoding="utf-8"))
        return not isinstance(config.get("chat_template"), list) and not config.get("add_bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end token."""
        return self._id("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text."""
        return self._id("bos_token")

    def get_vocab(self) -> dict[str, int]:
        """Every token with its id."""
        return dict(self._tokenizer.get_vocab())

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int | None]:
        """Ids of tokens."""
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def __call__(self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False, **_: Any) -> SimpleNamespace:
        """Token ids of a text, as `input_ids`."""
        # The tokenizer takes this as its state, not as an argument of `encode`.
        self._tokenizer.encode_special_tokens = split_special_tokens
        return SimpleNamespace(input_ids=self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """Text of token ids."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """The texts of the tokens with a name, which templates may write."""
        return dict(self._names)

    def _id(self, name: str) -> int | None:
        token = self._names.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)


def load_codec(settings: CheckSettings) -> ChatCodec:
    """Return the codec of the model's tokenizer; one that `FileTokenizer` cannot read, or that vLLM is to use, is left to transformers."""
    path = Path(settings.model.model)
    tokenizer = FileTokenizer(path) if FileTokenizer.can_read(path) else load_tokenizer(settings.model.model)
    codec = make_codec(tokenizer, settings)
    if isinstance(tokenizer, FileTokenizer) and is_fitted_by_vllm(codec, settings.endpoint):
        codec = make_codec(load_tokenizer(settings.model.model), settings)
    fit_parser(codec, settings.endpoint)
    return codec
