"""Turns of the assistant as a chat template writes them: the prompt that opens a turn, and the answer behind it, as text.

The template is a black box. An answer is what it writes for the chat with the answer less what it writes for the chat that asks for one, so
its tokens are those that a model samples. That nothing of a message is left out is checked on the text that was written.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from agentrl.core.errors import ChatTemplateError
from agentrl.core.types import Message
from agentrl.env.tools.environment import describe_tools, with_system
from agentrl.rollout.appending import END, MESSAGE
from agentrl.rollout.forms import PROBE, QUESTION, Dialect, call_id, find_dialect, lost, probe_call, reasoning_of, with_calls_as_text
from agentrl.rollout.plan import ModelConfig
from agentrl.rollout.template import OPENING, REMEDY, SWITCHES, ChatTemplate, variables_of
from agentrl.rollout.text_codec import TextCodec, shared_length

_BLOCK = re.compile(r"\s*<think>(.*?)</think>(.*)\Z", re.DOTALL)  # thinking that stands in the content
_PLAIN, _ROLES = frozenset({"role", "content"}), frozenset({"system", "user", "assistant"})
_TOOL = {"type": "function", "function": {"name": PROBE, "description": "Any.", "parameters": {"type": "object", "properties": {}}}}


@dataclass(frozen=True, slots=True)
class Turn:
    """Text of a turn, in which marks stand for control tokens that messages spell.

    Attributes:
        prompt: The chat up to where the answer begins.
        answer: The answer with the token that ends it.
    """

    prompt: str
    answer: str


class TurnRenderer:
    """Renders the turns of chats, and finds what ends them.

    Args:
        codec: The model's tokenizer.
        settings: The user's own template, variables and thinking switch.
        system_prompt: System message of chats that have none.
        end_token: The user's own end token, for a template that writes none.

    Raises:
        ConfigError: If the template cannot be read, or neither it nor its prompt knows the wanted thinking.
    """

    def __init__(self, codec: TextCodec, settings: ModelConfig, *, system_prompt: str = "", end_token: str = "") -> None:
        self._codec, self._thinking, self._system_prompt, self._end_token = codec, settings.thinking, system_prompt, end_token
        self._template = _template(codec, settings)
        self.control = re.compile("|".join(map(re.escape, codec.control_tokens)) or "(?!)")
        self._first_letters = sorted({token[0] for token in codec.control_tokens})
        self._next_turn = lru_cache(maxsize=2)(self._find_next_turn)

    def last_control(self, text: str) -> int:
        """Return where the last control token in a text begins; -1 if there is none."""
        found = -1
        # A pattern searches from the front only, and a long chat has its last control token near its end.
        for letter in self._first_letters:
            place = text.rfind(letter)
            while place > found:
                if self.control.match(text, place):
                    found = place
                    break
                place = text.rfind(letter, 0, place)
        return found

    def prompt(self, messages: Sequence[Message], table: list[str]) -> str:
        """Return the text of a chat up to where the assistant writes; `table` gets what its marks stand for.

        Raises:
            ChatTemplateError: If the template refuses the messages, or leaves a part of one out.
        """
        chat, tools = self._opened(messages, table)
        return self._prompt(chat, tools)

    def turns(self, messages: Sequence[Message], places: Sequence[int], table: list[str]) -> list[Turn]:
        """Return the turns of the messages at these places, all of the assistant; `table` gets what their marks stand for.

        Raises:
            ChatTemplateError: If the template refuses the messages, leaves a part of one out, or writes the prompt in another way when the
                answer follows.
        """
        if not any("<think>" in message["content"] for message in messages if message["role"] == "assistant"):
            return self._turns(messages, places, table)
        split = [_split(message) for message in messages]
        try:
            return self._turns(split, places, table)
        except ChatTemplateError as refusal:  # a template that knows no thinking writes the block as it writes any text
            try:
                return self._turns(messages, places, table)
            except ChatTemplateError:
                raise refusal from None

    def _turns(self, messages: Sequence[Message], places: Sequence[int], table: list[str]) -> list[Turn]:
        if self._needs_no_change(messages) and (turns := self._turns_at_once(messages, (), places, as_they_are=True)):
            return turns
        chat, tools = self._opened(messages, table)
        places = [place + len(chat) - len(messages) for place in places]
        return self._turns_at_once(chat, tools, places) or [self._turn(chat[: place + 1], tools) for place in places]

    def _needs_no_change(self, messages: Sequence[Message]) -> bool:
        """Return True for a chat of plain texts that the template takes as it is."""
        return (
            not self._system_prompt
            and self._marked is not None
            and not self._dialect.parts
            and all(message.keys() == _PLAIN and message["role"] in _ROLES for message in messages)
            and all(isinstance(message["content"], str) and self._codec.is_plain(message["content"]) for message in messages)
        )

    def _turns_at_once(
        self, chat: Sequence[Message], tools: Sequence[Any], places: Sequence[int], *, as_they_are: bool = False
    ) -> list[Turn] | None:
        """Return the turns by one rendering of the chat; `None` if its beginnings may look another way, or a part is lost."""
        pieces = self._pieces(chat, tools, as_they_are=as_they_are)
        if pieces is None or any(_may_be_lost(message, pieces[index + 1], pieces[0]) for index, message in enumerate(chat)):
            return None
        text, ends = "".join(pieces), list(itertools.accumulate(map(len, pieces)))
        opens, closes = self._behind
        return [self._divided_turn(chat[place], text[: ends[place]] + opens, text[: ends[place + 1]] + closes) for place in places]

    def _pieces(self, chat: Sequence[Message], tools: Sequence[Any], *, as_they_are: bool = False) -> list[str] | None:
        """Return what the template writes before the first message, and for each message, by one rendering."""
        if self._marked is None:
            return None
        try:
            text = self._marked.render(chat) if as_they_are else self._render(chat, tools, template=self._marked)
            pieces = text.partition(END)[0].split(MESSAGE)
        except ChatTemplateError:
            return None
        return pieces if len(pieces) == len(chat) + 1 else None

    @cached_property
    def _marked(self) -> ChatTemplate | None:
        return self._template.with_marks()

    @cached_property
    def _behind(self) -> tuple[str, str]:
        """Text that the template writes behind the last message: with a turn that it opens, and without."""
        opens, closes = (self._render([QUESTION], opens_turn=opens_turn, template=self._marked) for opens_turn in (True, False))
        return opens.partition(END)[2], closes.partition(END)[2]

    def _opened(self, messages: Sequence[Message], table: list[str]) -> tuple[list[Message], list[Any]]:
        """Return a chat with what belongs in its system message, and the tools that the template is to describe."""
        if not self._template.exists:
            raise ChatTemplateError("the tokenizer has no chat template, so the roles of messages would be lost. " + _NO_TEMPLATE)
        chat = list(messages)
        tools = list(chat[0].get("tools") or ())
        if self._system_prompt and chat[0]["role"] != "system":
            chat.insert(0, Message(role="system", content=self._system_prompt))
        if tools and not self._describes_tools:  # as in reinforcement learning: described in the system message, called by JSON in tags
            told = with_system(chat, describe_tools(tools))
            chat = [{**each, "content": with_calls_as_text(each), "tool_calls": []} if each.get("tool_calls") else each for each in told]
            tools = []
        else:
            for message in chat:
                self._check_kinds(message)
        return self._codec.protect(chat, table), self._codec.protect(tools, table)

    def _check_kinds(self, message: Message) -> None:
        if message.get("tool_calls") and not self._dialect.writes_calls:
            raise ChatTemplateError(f"{self._template.name} writes no tool calls. {REMEDY}, or leave the row out")
        if message["role"] == "tool" and not self._dialect.writes_results:
            raise ChatTemplateError(f"{self._template.name} writes no results of tools. {REMEDY}, or leave the row out")

    @cached_property
    def _dialect(self) -> Dialect:
        return find_dialect(self._template)

    @cached_property
    def _describes_tools(self) -> bool:
        return PROBE in self._render([QUESTION], [_TOOL])

    def _render(
        self, chat: Sequence[Message], tools: Sequence[Any] = (), *, opens_turn: bool = False, template: ChatTemplate | None = None
    ) -> str:
        written = [{key: value for key, value in message.items() if key != "weight"} for message in chat]
        form = self._dialect.finished(self._dialect.normal(written))  # type: ignore[arg-type]
        return (template or self._template).render(form, tools, add_generation_prompt=opens_turn)

    def _prompt(self, chat: Sequence[Message], tools: Sequence[Any]) -> str:
        prompt = self._render(chat, tools, opens_turn=True)
        self._check_whole(prompt, chat)
        return prompt

    def _check_whole(self, text: str, chat: Sequence[Message]) -> None:
        if missing := lost(text, chat):
            raise ChatTemplateError(f"{self._template.name} leaves out {missing}. {REMEDY}, or leave the row out")

    def _turn(self, chat: Sequence[Message], tools: Sequence[Any]) -> Turn:
        return self._divided_turn(chat[-1], self._prompt(chat[:-1], tools), self._render(chat, tools))

    def _divided_turn(self, message: Message, prompt: str, whole: str) -> Turn:
        """Return the turn of an answer, by the text of the chat before it and with it."""
        thinking = reasoning_of(_split(message))
        prompt, answer = self._divided(prompt, whole, thinking)
        if not _is_in(message, answer):
            self._check_whole(answer, [message])
        if thinking and "".join(thinking.split()) not in "".join(answer.split()):
            problem = f"leaves out the thinking of an answer: {thinking.strip()[:60]!r}"
            raise ChatTemplateError(f"{self._template.name} {problem}. {REMEDY}, or leave the column out")
        return Turn(prompt, self._ended(answer, "tool" if message.get("tool_calls") else "user"))

    def _divided(self, prompt: str, whole: str, thinking: str) -> tuple[str, str]:
        """Return the prompt, and what follows it when the answer is given."""
        if whole.startswith(prompt):
            return prompt, whole[len(prompt) :]
        opening = OPENING.search(prompt)
        head = prompt[: opening.start()] if opening else prompt
        if opening is None or not whole.startswith(head) or self._thinking not in ("on", "off"):
            place = shared_length(prompt, whole)
            place = min(place, opening.start()) if opening else place
            problem = f"{prompt[place:][:40]!r} where an answer is to begin, but {whole[place:][:40]!r} where it is given"
            raise ChatTemplateError(f"{self._template.name} writes {problem}. {_THINKING}")
        tag, rest = opening[1], whole[len(head) :]
        closing = "" if rest.startswith(f"<{tag}>") else f"\n</{tag}>\n\n"
        rest = rest.removeprefix(f"<{tag}>")
        return (prompt, (thinking if closing else "") + closing + rest) if self._thinking == "on" else (prompt + closing, rest)

    def _ended(self, answer: str, next_role: str) -> str:
        """Return an answer up to the token that ends a turn in the middle of a chat; with one, if the template writes none."""
        inner = answer.removesuffix(self._chat_end)
        if self._closes_turns and inner.rstrip().endswith(tuple(self._codec.control_tokens)):
            return inner.rstrip()
        return answer + (self._end_token or self._next_turn(next_role))

    @cached_property
    def _closes_turns(self) -> bool:
        return self.control.search(self._after_answer()) is not None

    @cached_property
    def _chat_end(self) -> str:
        """Text that the template writes behind the end of the last turn only, such as the end token of a whole document."""
        last, inside = self._after_answer(), self._after_answer("user")
        shared = [found.end() for found in self.control.finditer(last[: shared_length(last, inside)])]
        return last[shared[-1] :] if shared else ""

    def _find_next_turn(self, role: str) -> str:
        """Return the token that begins the next message, which ends a turn where the template writes no end; else the end token."""
        found = self.control.match(self._after_answer(role).lstrip())
        return found.group() if found else self._codec.tokenizer.eos_token or ""

    def _after_answer(self, role: str = "") -> str:
        """Return what the template writes behind an answer, with a message of a role after it."""
        called = role == "tool"
        calls = {"tool_calls": [probe_call("add")]} if called else {}
        chat: list[Any] = [QUESTION, {"role": "assistant", "content": "" if called else PROBE, **calls}]
        following: list[Any] = [{"role": role, "content": "?", "tool_call_id": call_id(0), "name": "add"}] if role else []
        try:
            before, whole = self._render(chat).rstrip(), self._render([*chat, *following])
        except ChatTemplateError:
            return ""
        return whole.removeprefix(before) if called else whole.rpartition(PROBE)[2]


_NO_TEMPLATE = "Give one with --chat-template FILE, or train texts as they are with --no-apply-chat-template"
_THINKING = "Say with --thinking on or off what the model does there, or give another template with --chat-template FILE"


def _template(codec: TextCodec, settings: ModelConfig) -> ChatTemplate:
    """Return the template with the user's settings; one without a switch for thinking may have a prompt that opens it."""
    plain = ChatTemplate(codec.tokenizer, replace(settings, thinking="auto"))
    if plain.exists and settings.thinking in ("on", "off") and not SWITCHES[settings.thinking].keys() & variables_of(plain.source):
        opened = plain.render([dict(QUESTION)], add_generation_prompt=True)
        if OPENING.search(opened):
            return plain
    return ChatTemplate(codec.tokenizer, settings)


def _may_be_lost(message: Message, piece: str, opening: str) -> bool:
    """Return True if a message may not be whole in what is written for it; the first one may stand in the opening."""
    return not _is_in(message, piece) and bool(lost(piece, [message]) and lost(opening, [message]))


def _is_in(message: Message, text: str) -> bool:
    """Return True for a message of plain text that another text has as it is; most messages are that."""
    content = message["content"]
    return not message.get("tool_calls") and isinstance(content, str) and content.strip() in text


def _split(message: Message) -> Message:
    """Return a message whose thinking, a block at the beginning of its content, is a field of its own."""
    if message["role"] != "assistant" or "<think>" not in message["content"] or reasoning_of(message):
        return message
    block = _BLOCK.match(message["content"])
    return message if block is None else {**message, "reasoning_content": block[1].strip("\n"), "content": block[2].lstrip("\n")}  # type: ignore[typeddict-unknown-key]
