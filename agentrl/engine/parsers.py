"""Parsers of answers: the one that the settings name, or the first that reads what the chat template writes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from agentrl.config.schema import EndpointConfig
from agentrl.core.errors import ConfigError
from agentrl.core.plugins import suggest
from agentrl.core.protocols import Structure
from agentrl.engine.settings import prepare_environment
from agentrl.rollout.call_proof import Called, reads, written_calls
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.endpoint.answers import (
    AUTO_PARSER,
    JSON_PARSER,
    AnswerParser,
    JsonAnswerParser,
    Parts,
    names_own_form,
    one_of,
    split_thought,
)
from agentrl.rollout.endpoint.neutral import Json


class VllmAnswerParser:
    """Takes whole answers apart with vLLM's parsers; see `agentrl.rollout.endpoint.answers.AnswerParser`."""

    def __init__(self, tokenizer: Any, tool_parser: Any, reasoning_parser: Any) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tokenizers.hf import get_cached_tokenizer

        self._tokenizer = get_cached_tokenizer(tokenizer)  # parsers are made for each answer, and ask for the whole vocabulary
        self._tool_parser, self._reasoning_parser = tool_parser, reasoning_parser
        self._make_request, self._fallback = ChatCompletionRequest, JsonAnswerParser()

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
        return Parts(text=calls.content or "", reasoning=reasoning, calls=named)

    def _divided(self, sampled: str, request: Any) -> tuple[str, str]:
        """Reasoning and the rest of an answer."""
        if self._reasoning_parser is None:
            return split_thought(sampled)
        found, rest = self._reasoning_parser(self._tokenizer).extract_reasoning(sampled, request)
        return found or "", rest or ""

    def structure(self, schema: Json | None, tools: Sequence[Json]) -> Structure | None:
        """As `AnswerParser.structure`, with the structural tag that vLLM has for calls of the model, if it has one."""
        if self._tool_parser is None or not tools:
            return self._fallback.structure(schema, tools)
        strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]
        request = self._make_request(messages=[], model="policy", tools=strict, tool_choice="required")
        tag = self._tool_parser(self._tokenizer, request.tools).get_structural_tag(request)
        return None if tag is None else one_of(schema, [json.loads(tag.model_dump_json())["format"]])


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
        return ""
    if config.tool_parser != AUTO_PARSER:
        return f"the parser {codec.tool_parser} does not read the calls that the template writes"
    if find_spec("vllm") is None:
        return "the calls are no JSON, and vLLM, which has parsers of other forms, is not installed"
    for name, other in _registered(codec.tokenizer, _reasoning_parser(config)):
        if reads(other, turns):
            codec.use_parser(other, name, template_tools=True)
            return ""
    return "no parser of vLLM reads the calls that the template writes"


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
