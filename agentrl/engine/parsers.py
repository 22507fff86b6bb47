"""Parsers of answers: the one that the settings name, or the first that reads what the chat template writes."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.core.plugins import suggest
from agentrl.core.protocols import Structure
from agentrl.engine.settings import prepare_environment
from agentrl.env.tools.calls import held_length
from agentrl.rollout.call_proof import Called, reads, written_calls
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.endpoint.answers import (
    AUTO_PARSER,
    JSON_PARSER,
    AnswerParser,
    JsonAnswerParser,
    Marks,
    Parts,
    Settled,
    names_own_form,
    one_of,
    split_thought,
)
from agentrl.rollout.endpoint.neutral import Json
from agentrl.rollout.plan import EndpointConfig
from agentrl.rollout.text_codec import shared_length

PLAIN = "Three."
"""Answer without any mark."""
_OPENING = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]|\S")


class VllmAnswerParser:
    """Takes whole answers apart with vLLM's parsers; see `agentrl.rollout.endpoint.answers.AnswerParser`."""

    def __init__(self, tokenizer: Any, tool_parser: Any, reasoning_parser: Any) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tokenizers.hf import get_cached_tokenizer

        self._tokenizer = get_cached_tokenizer(tokenizer)  # parsers are made for each answer, and ask for the whole vocabulary
        self._tool_parser, self._reasoning_parser = tool_parser, reasoning_parser
        self._make_request, self._fallback = ChatCompletionRequest, JsonAnswerParser()
        self.opening = ""  # text that every call begins with; "" if it is not known

    def parse(self, sampled: str, tools: Sequence[Json], *, reasons: bool = True) -> Parts:
        """As `AnswerParser.parse`; what a parser cannot take apart is text."""
        try:
            request = self._make_request(messages=[], model="policy", tools=[dict(tool) for tool in tools] or None)
            reasoning, text = self._divided(sampled, request) if reasons else ("", sampled)
            if self._tool_parser is None:
                parts = self._fallback.parse(text, tools, reasons=reasons)
                return Parts(text=parts.text, reasoning=reasoning or parts.reasoning, calls=parts.calls)
            if not tools:
                return Parts(text=text, reasoning=reasoning)
            calls = self._tool_parser(self._tokenizer, request.tools).extract_tool_calls(text, request)
        except Exception:  # parsers are written for what a model was trained on, and raise anything for other texts
            return self._fallback.parse(sampled, (), reasons=reasons)
        if not calls.tools_called:
            return Parts(text=text, reasoning=reasoning)
        named = tuple((call.function.name, call.function.arguments) for call in calls.tool_calls)
        return Parts(text=_said(text, (calls.content or "").strip()), reasoning=reasoning, calls=named)

    @cached_property
    def marks(self) -> Marks | None:
        """As `AnswerParser.marks`: those of the parser of reasoning, if it says them."""
        if self._reasoning_parser is None:
            return Marks(has_channels=self._tool_parser is None)
        parser, request = self._reasoning_parser(self._tokenizer), self._make_request(messages=[], model="policy")
        think, thought = getattr(parser, "reasoning_start_str", None), getattr(parser, "reasoning_end_str", None)
        if not (think and thought):
            return None
        try:
            is_text = self._divided(PLAIN, request) == ("", PLAIN)
        except Exception:  # as in `parse`
            is_text = False
        return Marks(think=think, thought=thought, is_text_without=is_text, has_channels=False)

    def settled(self, rest: str, tools: Sequence[Json], *, begins: bool, is_held: bool = False) -> Settled:
        """As `AnswerParser.settled`: text is settled up to where a call begins, and calls are at the end of the answer."""
        if self._tool_parser is None:
            return self._fallback.settled(rest, tools, begins=begins, is_held=is_held)
        if not self.opening:
            return Settled()
        place = rest.find(self.opening)
        text = rest[: place if place >= 0 else len(rest) - held_length(rest, (self.opening,))].rstrip()
        return Settled(text=text, used=len(text))

    def _divided(self, sampled: str, request: Any) -> tuple[str, str]:
        """Reasoning and the rest of an answer, without the blanks between them."""
        if self._reasoning_parser is None:
            return split_thought(sampled)
        found, rest = self._reasoning_parser(self._tokenizer).extract_reasoning(sampled, request)
        return (found.strip(), (rest or "").lstrip("\n")) if found else ("", rest or "")

    def structure(self, schema: Json | None, tools: Sequence[Json]) -> Structure | None:
        """As `AnswerParser.structure`, with the structural tag that vLLM has for calls of the model, if it has one."""
        if self._tool_parser is None or not tools:
            return self._fallback.structure(schema, tools)
        strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]
        request = self._make_request(messages=[], model="policy", tools=strict, tool_choice="required")
        tag = self._tool_parser(self._tokenizer, request.tools).get_structural_tag(request)
        return None if tag is None else one_of(schema, [json.loads(tag.model_dump_json())["format"]])


def _said(text: str, content: str) -> str:
    """The content of a text before its calls as it was sampled; parsers differ in the blanks that they leave around it."""
    begin = text.find(content)
    return text[: begin + len(content)] if content and not text[:begin].strip() else content


def answer_parser(config: EndpointConfig, tokenizer: Any) -> AnswerParser:
    """Return the parser that the configuration names, or `ConfigError`; vLLM is loaded only for one of its own."""
    if not names_own_form(config) and not config.reasoning_parser:
        return JsonAnswerParser()
    from vllm.tool_parsers import ToolParserManager

    tool_parser = None
    if names_own_form(config):
        tool_parser = _named("--tool-parser", config.tool_parser, ToolParserManager.get_tool_parser, ToolParserManager.list_registered())
    return VllmAnswerParser(tokenizer, tool_parser, _reasoning_parser(config))


def _reasoning_parser(config: EndpointConfig) -> Any:
    if not config.reasoning_parser:
        return None
    from vllm.reasoning import ReasoningParserManager

    known = ReasoningParserManager.list_registered()
    return _named("--reasoning-parser", config.reasoning_parser, ReasoningParserManager.get_reasoning_parser, known)


def fit_parser(codec: ChatCodec, config: EndpointConfig, parser: AnswerParser | None = None) -> str:
    """Give a codec the parser of answers that the configuration names; with ``auto`` the first that reads what its template writes.

    Args:
        codec: The codec, with the model's own tokenizer.
        config: Names of the parsers.
        parser: The parser that `answer_parser` made of the configuration, if it was made before.

    Returns:
        The reason why the parser is not proven to read the template's calls; "" if it is.

    Raises:
        ConfigError: If vLLM has no parser of a name.
    """
    parser = parser or answer_parser(config, codec.tokenizer)
    named = names_own_form(config)
    codec.use_parser(parser, config.tool_parser if named else JSON_PARSER)
    if not codec.tool_description:
        return "the template describes no tools"
    if not (turns := written_calls(codec)):
        return "the template does not write calls whole"
    if reads(parser, turns):
        _say_opening(parser, turns)
        return ""
    if config.tool_parser != AUTO_PARSER:
        return f"the parser {codec.tool_parser} does not read the calls that the template writes"
    if find_spec("vllm") is None:
        return "the calls are no JSON, and vLLM, which has parsers of other forms, is not installed"
    for name, other in _registered(codec.tokenizer, _reasoning_parser(config)):
        if reads(other, turns):
            _say_opening(other, turns)
            codec.use_parser(other, name, template_tools=True)
            return ""
    return "no parser of vLLM reads the calls that the template writes"


def _say_opening(parser: AnswerParser, turns: Sequence[tuple[str, Called]]) -> None:
    """Tell a parser of vLLM what the calls begin with that it was proven to read: a tag, or one character."""
    first, *others = [text[: text.index(called[0][0])] for text, called in turns]
    for other in others:
        first = first[: shared_length(first, other)]
    found = _OPENING.match(split_thought(first)[1].lstrip())
    if isinstance(parser, VllmAnswerParser) and found is not None:
        parser.opening = found[0]


def is_fitted_by_vllm(codec: ChatCodec, config: EndpointConfig) -> bool:
    """Return True if `fit_parser` needs vLLM, which wants a tokenizer of transformers."""
    if names_own_form(config) or config.reasoning_parser:
        return True
    turns: list[tuple[str, Called]] = written_calls(codec) if config.tool_parser == AUTO_PARSER and codec.tool_description else []
    return bool(turns) and not reads(JsonAnswerParser(), turns) and find_spec("vllm") is not None


def _registered(tokenizer: Any, reasoning_parser: Any) -> Iterator[tuple[str, AnswerParser]]:
    """Yield the parsers of tool calls that vLLM has, by name; those that cannot be imported here are left out."""
    prepare_environment("cuda")  # without what is for an engine on a CPU only: the learner may be in this process
    from vllm.tool_parsers import ToolParserManager

    with _quiet():
        for name in ToolParserManager.list_registered():
            try:
                tool_parser = ToolParserManager.get_tool_parser(name)
            except Exception:  # a parser may need a package that is not installed
                continue
            yield name, VllmAnswerParser(tokenizer, tool_parser, reasoning_parser)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep vLLM from reporting texts that are no calls in a parser's form."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def _named(flag: str, name: str, get: Any, known: Sequence[str]) -> Any:
    try:
        return get(name)
    except KeyError:
        raise ConfigError(flag, name, "is no parser of vLLM", suggest(name, known) or f"There are {', '.join(known)}.") from None
