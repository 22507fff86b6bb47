"""Between chat messages and token ids: prompts, the pieces of a template between turns, and text that is only text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from agentrl.core.errors import ConfigError, EnvResultError
from agentrl.core.types import Message, Prompt
from agentrl.env.results import RawText
from agentrl.env.tools.environment import describe_tools, with_system
from agentrl.rollout.text_codec import TextCodec

_ASSISTANT = "\ue0000\ue001"
_CALL_FORM = re.compile(r'<tool_call>\s*\{|\{\s*"tool":|\{\s*"name":(?!\s*")')  # JSON in tags, or bare; schemas have "name" and a text

SHORT = 1000
"""Characters up to which an environment's answer is looked up among earlier ones."""


class ChatCodec(TextCodec):
    """Turns messages into token ids with a tokenizer's chat template, and never text that was sampled.

    With `template_tools` the template's own description of tools is used, whatever form of calls it asks for.

    A tokenizer without a template joins the contents of the messages by line breaks.

    Raises:
        ConfigError: If the template cannot render a dialogue of several turns.
    """

    def __init__(self, tokenizer: Any, *, system_prompt: str = "", end_token_ids: Sequence[int] = (), template_tools: bool = False) -> None:
        super().__init__(tokenizer)
        self._system_prompt, self._template_tools = system_prompt, template_tools
        self._questions = lru_cache(maxsize=256)(lambda text: tuple(self.encode_chat([Message(role="user", content=text)])))
        self._answers = lru_cache(maxsize=1024)(
            lambda role, text, last_id: tuple(self._encode_next([Message(role=role, content=text)], last_id))
        )
        self.end_token_ids = tuple(sorted({*self._own_end_token_ids(), *end_token_ids}))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a chat from its beginning, up to where the model is to write.

        Raises:
            EnvResultError: If the template refuses the messages, or their tools are no JSON schemas.
        """
        tools = _tools_of(messages)
        chat: list[Any] = [{key: value for key, value in message.items() if key != "tools"} for message in messages]
        if self._system_prompt and chat[0]["role"] != "system":
            chat.insert(0, {"role": "system", "content": self._system_prompt})
        if tools and not self.describes_tools:
            chat, tools = with_system(chat, describe_tools(tools)), []
        table = [""]
        rendered = self._render([self.protect(message, table) for message in chat], self.protect(tools, table))
        start = [] if self._tokenizer.chat_template else self._tokenizer("").input_ids[:1]
        bos = self._tokenizer.bos_token_id
        return [token for token in start if token == bos] + self.encode_marked(rendered, table)

    def encode_question(self, text: str) -> list[int]:
        """Token ids of a chat of one user's message; the latest are kept, because all members of a group are asked the same."""
        return list(self._questions(text))

    @cached_property
    def describes_tools(self) -> bool:
        """True if the template describes tools and asks for calls in a form that `parse_tool_calls` accepts."""
        parameters = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
        probe = {"type": "function", "function": {"name": "some_probe", "description": "Probe.", "parameters": parameters}}
        try:
            rendered = self._render([{"role": "user", "content": "?"}], [probe]) if self._tokenizer.chat_template else ""
        except EnvResultError:
            return False
        return "some_probe" in rendered and (self._template_tools or _CALL_FORM.search(rendered) is not None)

    def encode_next(self, messages: Sequence[Message], last_id: int) -> list[int]:
        """Token ids to append after a sampled turn: the end of that turn, the messages, the head of the next turn.

        Short answers are kept, because environments repeat themselves. If `last_id`, the last sampled token, is not the template's end
        token, that is appended first.

        Raises:
            EnvResultError: If the template refuses the messages.
        """
        text = messages[0]["content"]
        if len(messages) == 1 and messages[0].keys() == {"role", "content"} and isinstance(text, str) and len(text) <= SHORT:
            return list(self._answers(messages[0]["role"], text, last_id))
        return self._encode_next(messages, last_id)

    def call_text(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Text of an answer that makes tool calls, as the template writes it; "" if it does not write them."""
        chat: list[Any] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": list(calls)}]
        try:
            before, whole = self._render(chat[:1]), self._render(chat, opens_turn=False)
        except EnvResultError:
            return ""
        written, _, _ = whole.removeprefix(before).partition(self.decode(self.turn_end_ids) or "\n")
        return written if whole.startswith(before) and written.strip() else ""

    def _encode_next(self, messages: Sequence[Message], last_id: int) -> list[int]:
        table = [""]
        answer = [self.protect(message, table) for message in messages]
        rendered = self._render([{"role": "user", "content": "?"}, {"role": "assistant", "content": _ASSISTANT}, *answer])
        _, found, rest = rendered.rpartition(_ASSISTANT)
        if not found:
            raise EnvResultError("the model's chat template leaves out an earlier turn of the assistant, so turns cannot be appended")
        ids = self.encode_marked(rest, table)
        first = next((index for index, token in enumerate(ids) if token in self._control_ids), None)
        return ids[first + 1 :] if first is not None and ids[first] == last_id else ids

    def decode_action(self, ids: Sequence[int]) -> str:
        """Text of a sampled turn without its end token."""
        ended = len(ids) > 0 and int(ids[-1]) in self.end_token_ids
        return self.decode(ids[:-1] if ended else ids)

    @cached_property
    def turn_end_ids(self) -> list[int]:
        """The token that ends a turn of the model: the one that the template puts there, else the tokenizer's; empty if there is none."""
        try:
            ids = self.encode_next([Message(role="user", content="?")], -1)
        except EnvResultError as error:
            name = getattr(self._tokenizer, "name_or_path", "")
            raise ConfigError("--model", name, str(error), "Use a chat template that renders every turn.") from error
        found = next((token for token in ids if token in self._control_ids), self._tokenizer.eos_token_id)
        return [] if found is None else [found]

    def _own_end_token_ids(self) -> set[int]:
        """The tokenizer's end token, and the one that the template puts after a turn."""
        return {*self.turn_end_ids, *([] if self._tokenizer.eos_token_id is None else [self._tokenizer.eos_token_id])}

    def _render(self, chat: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), *, opens_turn: bool = True) -> str:
        if not self._tokenizer.chat_template:
            return "".join(_plain(message.get("content")) + "\n" for message in chat)
        try:
            options = {"tools": list(tools)} if tools else {}
            return str(self._tokenizer.apply_chat_template(list(chat), tokenize=False, add_generation_prompt=opens_turn, **options))
        except Exception as error:  # templates raise errors of their own, and any error of the values they touch
            roles = ", ".join(str(message.get("role")) for message in chat)
            raise EnvResultError(f"the model's chat template refuses messages of the roles {roles}: {error}") from error


def _tools_of(messages: Sequence[Message]) -> list[Any]:
    try:
        tools = [tool for message in messages for tool in message.get("tools") or ()]
        json.dumps(tools)
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvResultError(f"the tools in the messages are not a list of JSON schemas: {error}") from error
    return tools


def _plain(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return "" if content is None else str(content)


def encode_prompt(codec: ChatCodec, prompt: Prompt, *, apply_chat_template: bool) -> list[int]:
    """Token ids of messages, of plain text (one user message if `apply_chat_template`), or of `RawText`, which is taken as it is."""
    if not isinstance(prompt, str):
        return codec.encode_chat(prompt)
    if isinstance(prompt, RawText) or not apply_chat_template:
        return codec.encode_text(prompt)
    return codec.encode_question(prompt)
