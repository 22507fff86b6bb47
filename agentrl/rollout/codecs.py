"""The chat codec of a command's settings, and prompts in its tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from agentrl.core.errors import ConfigError
from agentrl.core.types import Prompt
from agentrl.env.plan import DataConfig, ImageConfig
from agentrl.env.results import RawText
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.endpoint.answers import names_own_form
from agentrl.rollout.images import open_reader
from agentrl.rollout.plan import EndpointConfig, ModelConfig
from agentrl.rollout.template import ChatTemplate


class CodecSettings(Protocol):
    """Sections of a command that say how chats are rendered."""

    @property
    def model(self) -> ModelConfig:
        """The template."""

    @property
    def data(self) -> DataConfig:
        """The system prompt."""

    @property
    def endpoint(self) -> EndpointConfig:
        """The form of tool calls."""


def make_codec(tokenizer: Any, settings: CodecSettings, end_token_ids: Sequence[int] = ()) -> ChatCodec:
    """Return the codec of a command's settings; `end_token_ids` are those that the model's configuration names."""
    codec = ChatCodec(
        tokenizer,
        system_prompt=settings.data.system_prompt,
        end_token_ids=end_token_ids,
        template_tools=names_own_form(settings.endpoint),
        template=ChatTemplate(tokenizer, settings.model),
    )
    _check_vocabulary(codec, Path(settings.model.model) / "config.json")
    return codec


def let_see(codec: ChatCodec, model: ModelConfig, limits: ImageConfig) -> None:
    """Let a codec put images in the places that a chat has for them, if its model reads images."""
    codec.images = open_reader(model.model, limits, trust_remote_code=model.trust_remote_code)


def encode_prompt(codec: ChatCodec, prompt: Prompt, *, apply_chat_template: bool) -> list[int]:
    """Token ids of messages, of plain text (one user message if `apply_chat_template`), or of `RawText`, which is taken as it is."""
    if not isinstance(prompt, str):
        return codec.encode_chat(prompt)
    if isinstance(prompt, RawText) or not apply_chat_template:
        return codec.encode_text(prompt)
    return codec.encode_question(prompt)


def _check_vocabulary(codec: ChatCodec, config: Path) -> None:
    """Make sure that a model, if it is a directory here, has the tokens that a chat is made of."""
    if not config.is_file():
        return
    shape = json.loads(config.read_text(encoding="utf-8"))
    # Models that read images have the size in the part of their configuration that is about text.
    size = shape.get("vocab_size") or (shape.get("text_config") or {}).get("vocab_size")
    highest = max([*codec.encode_question("?"), *codec.turn_end_ids])
    if isinstance(size, int) and highest >= size:
        problem = f"vocab_size = {size:,} in config.json, and a chat has the token {highest:,} of its tokenizer"
        raise ConfigError("--model", str(config.parent), problem, "Give the model its own tokenizer, or resize its embeddings.")
