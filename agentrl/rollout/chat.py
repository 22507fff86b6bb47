"""Between chat messages and token ids: prompts, what stands behind a sampled turn, and text that is only text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

from agentrl.core.errors import ChatTemplateError, ConfigError, EnvResultError
from agentrl.core.types import Message
from agentrl.env.tools.calls import ParsedText, ToolCall, call_of, parse_tool_calls
from agentrl.env.tools.environment import describe_tools, with_system
from agentrl.rollout import forms
from agentrl.rollout.endpoint.answers import JSON_PARSER, AnswerParser, JsonAnswerParser
from agentrl.rollout.forms import PROBE, QUESTION, SYSTEM, Messages, call_id, probe_call
from agentrl.rollout.images import ImageReader
from agentrl.rollout.template import OPENING, ChatTemplate
from agentrl.rollout.text_codec import TextCodec, shared_length

_ANSWER = "\ue0000\ue001"  # stands for what was sampled last: the text of an answer, or an argument of its last call
_CALL_FORM = re.compile(r'<tool_call>\s*\{|\{\s*"tool":|\{\s*"name":(?!\s*")')  # JSON in tags, or bare; schemas have "name" and a text

FAITHFUL = "as they are behind no call"
"""Name of the form in which texts are written behind an answer, if the template takes them."""
SHORT = 1000
"""Characters up to which an environment's answer is looked up among earlier ones."""
VARIANTS = 8
"""Codecs with other variables of the template that are kept."""


class ChatCodec(TextCodec):
    """Turns messages into token ids with a tokenizer's chat template, and never text that was sampled.

    What is needed of the template is proven by probes here, and of each rendering: the tokens that end a turn, the form in which it takes
    messages, what it writes behind an answer, and that nothing is left out.

    Text inside a message that spells a control token ("<|im_end|>") is tokenised as ordinary text: it is replaced by a
    mark before the template is rendered, and the marks are tokenised apart. All other text is tokenised with the template
    around it, as everywhere else.

    With `template_tools` the template's own description of tools is used, whatever form of calls it asks for. `use_parser` gives the
    codec what reads those calls, which is JSON without it.

    A tokenizer without a template joins the contents of the messages by line breaks.

    Raises:
        ConfigError: If the template cannot render a dialogue of several turns, or no token ends a turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system_prompt: str = "",
        end_token_ids: Sequence[int] = (),
        template_tools: bool = False,
        template: ChatTemplate | None = None,
    ) -> None:
        super().__init__(tokenizer)
        self._system_prompt, self._template_tools, self._given_ends = system_prompt, template_tools, end_token_ids
        self.template = template or ChatTemplate(tokenizer)
        self.parser: AnswerParser = JsonAnswerParser()
        self.tool_parser = JSON_PARSER  # name of the parser of tool calls
        self.images: ImageReader | None = None  # of a model that reads images
        self._questions = lru_cache(maxsize=256)(lambda text: tuple(self.encode_chat([Message(role="user", content=text)])))
        self._answers = lru_cache(maxsize=1024)(lambda role, text, last_id, system: tuple(self._encode_text(role, text, last_id, system)))
        self._opening = lru_cache(maxsize=64)(self._find_opening)
        self._head = lru_cache(maxsize=64)(lambda system: [self.protect(message, [""]) for message in (*_system_of(system), QUESTION)])
        self._bodies = lru_cache(maxsize=256)(self._body)
        self._variants = lru_cache(maxsize=VARIANTS)(self._variant)
        self.forms: dict[tuple[str, ...], str] = {}  # the form in which messages of these roles were written, by what was tried
        self._prove(end_token_ids)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a chat from its beginning, up to where the model is to write.

        Raises:
            EnvResultError: If the template refuses the messages or leaves a part of them out in every form, or their tools are no JSON
                schemas.
        """
        tools = forms.tools_of(messages)
        chat = self._dialect.normal(messages)
        if self._system_prompt and chat[0]["role"] != "system":
            chat.insert(0, Message(role="system", content=self._system_prompt))
        if tools and not self.describes_tools:
            chat, tools = forms.calls_as_text(with_system(chat, describe_tools(tools))), []
        rendered, table = self._written(chat, tools)
        return [*([] if self.template.exists else self.beginning), *self.encode_marked(rendered, table, keeps=True)]

    def encode_question(self, text: str) -> list[int]:
        """Token ids of a chat of one user's message; the latest are kept, because all members of a group are asked the same."""
        return list(self._questions(text))

    def with_variables(self, variables: Mapping[str, Any]) -> ChatCodec:
        """Return the codec whose template has these variables beside the run's, or this one if they change nothing.

        Raises:
            ChatTemplateError: If one of them is not the caller's to give.
            ConfigError: If the template cannot render a dialogue with them.
        """
        return self if self.template.with_variables(variables) is self.template else self._variants(json.dumps(variables, sort_keys=True))

    def _variant(self, variables: str) -> ChatCodec:
        made = ChatCodec(
            self._tokenizer,
            system_prompt=self._system_prompt,
            end_token_ids=self._given_ends,
            template_tools=self._template_tools,
            template=self.template.with_variables(json.loads(variables)),
        )
        made.lane, made.images = self.lane, self.images
        made.use_parser(self.parser, self.tool_parser)
        return made

    @property
    def dialect(self) -> forms.Dialect:
        """The form in which the template takes messages."""
        return self._dialect

    @property
    def describes_tools(self) -> bool:
        """True if the template describes tools and asks for calls in a form that the parser accepts."""
        return bool(self.tool_description) and (self._template_tools or self._asks_for_json)

    def use_parser(self, parser: AnswerParser, name: str, *, template_tools: bool = False) -> None:
        """Read answers with this parser; with `template_tools` it reads the calls that the template asks for."""
        self.parser, self.tool_parser = parser, name
        self._template_tools |= template_tools

    @cached_property
    def tool_description(self) -> str:
        """The template's description of a made-up tool; "" if it describes none."""
        parameters = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
        probe = {"type": "function", "function": {"name": PROBE, "description": "Probe.", "parameters": parameters}}
        try:
            rendered = self._render([QUESTION], [probe]) if self.template.exists else ""
        except EnvResultError:
            return ""
        return rendered if PROBE in rendered else ""

    def encode_next(self, messages: Sequence[Message], last_id: int, history: Sequence[Message] = ()) -> list[int]:
        """Token ids to append after a sampled turn: the end of that turn, the messages, the head of the next turn.

        Short answers are kept, because environments repeat themselves. If `last_id`, the last sampled token, is not the template's end
        token, that is appended first.

        Args:
            messages: The messages that answer the turn.
            last_id: The last token of the turn.
            history: The chat up to the turn, which is its last message, with its calls or with its text as it was sampled.

        Raises:
            EnvResultError: If the template refuses the messages, or leaves a part of them out, in every form.
        """
        first = messages[0]
        text, named = first["content"], first["role"] == "tool" and self._names_calls
        if len(messages) == 1 and first.keys() == {"role", "content"} and isinstance(text, str) and len(text) <= SHORT and not named:
            return list(self._answers(first["role"], text, last_id, self._system_text(history)))
        return self._encode_next(messages, last_id, history)

    def call_text(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Text of an answer that makes tool calls, as the template writes it; "" if it does not write them."""
        answer = Message(role="assistant", content="", tool_calls=[dict(call) for call in calls])
        try:
            opened, whole = self._render([QUESTION]), self._render([QUESTION, answer], opens_turn=False)
        except EnvResultError:
            return ""
        before = opened if whole.startswith(opened) else OPENING.sub("", opened)  # earlier turns may have no thinking
        written = whole.removeprefix(before)
        ends = [place for end in self._ends if (place := written.rfind(end)) > 0]
        written = written[: min(ends, default=None)] if ends else written.partition("\n" if not self._ends else self._ends[0])[0]
        return written if whole.startswith(before) and written.strip() else ""

    def _prove(self, given: Sequence[int]) -> None:
        """Find out what is needed of the template, or raise `ConfigError`."""
        field, name = self.template.field, self.template.value
        remedy = "Use a chat template that renders every turn: --chat-template FILE."
        try:
            self._dialect = forms.find_dialect(self.template) if self.template.exists else forms.Dialect(writes_calls=False)
            rest, self._table = self._after([QUESTION], Message(role="assistant", content=_ANSWER), [QUESTION])
        except EnvResultError as error:
            raise ConfigError(field, name, str(error), remedy) from error
        closing = self._closing(Message(role="assistant", content=_ANSWER))
        inside, eos = self._inside(), self._tokenizer.eos_token_id
        ending, going_on = self._controls(closing), self._controls(rest)
        self._closings = [one for one, two in zip(ending, going_on, strict=False) if one == two]
        own = next((token for token in [*self._closings[-1:], *ending[:1], *going_on[:1], eos] if token not in inside), eos)
        self.turn_end_ids = [] if own is None else [int(own)]
        called = [] if not self._dialect.writes_calls else self._controls(self._closing(_called(PROBE, _ANSWER)))[-1:]
        candidates = {*called, *self._known(given), *([] if eos is None else [eos])}
        self.end_token_ids = tuple(sorted(candidates - inside | {*self.turn_end_ids}))
        self._ends = [self.decode([token]) for token in self.end_token_ids]
        self._closes = dict(zip(ending[:1], going_on[:1], strict=False)) if not self._closings and going_on[:1] != [own] else {}
        if not self.end_token_ids:
            problem = "no token ends a turn: its tokenizer names none, and its chat template writes none"
            raise ConfigError(
                "--model", name, problem, "Set eos_token in tokenizer_config.json, and eos_token_id in generation_config.json."
            )

    def _known(self, given: Sequence[int]) -> Sequence[int]:
        """The tokens that the model's configuration ends a turn with, which its tokenizer must have."""
        size = 1 + max(self._tokenizer.get_vocab().values()) if given else 0
        if strange := [token for token in given if not 0 <= token < size]:
            problem = f"generation_config.json: eos_token_id = {strange[0]} is no token of its tokenizer, which has {size:,}"
            raise ConfigError("--model", getattr(self._tokenizer, "name_or_path", ""), problem, "Correct eos_token_id there.")
        return given

    def _inside(self) -> set[int]:
        """The control tokens that the template writes within a turn of the assistant, which end none: of channels, thinking and calls."""
        thought = {self._dialect.reasoning: PROBE} if self._dialect.reasoning else {}
        calls = [probe_call(PROBE, PROBE, place) for place in range(2)]
        found: set[int] = set()
        for answer in (
            {"content": PROBE, **thought},
            {"content": "", "tool_calls": calls, **thought},
            {"content": "", "tool_calls": calls[:1], **thought},
        ):
            chat = [QUESTION, Message(role="assistant", **answer)]  # type: ignore[typeddict-item]
            try:
                before, whole = self._render([QUESTION]), self._render(chat, opens_turn=False)
            except EnvResultError:
                continue
            if not forms.lost(whole, chat):
                begin = shared_length(before, whole)
                found.update(self._controls(whole[begin : max(begin, whole.rfind(PROBE))]))
        return found

    def _closing(self, answer: Message) -> str:
        """The text that the template writes behind the last answer of a chat; "" if it refuses such a chat."""
        try:
            _, found, rest = self._render([QUESTION, answer], opens_turn=False).rpartition(_ANSWER)
        except EnvResultError:
            return ""
        return rest if found else ""

    @cached_property
    def _asks_for_json(self) -> bool:
        """True if calls that the template writes, or else those it asks for, are JSON."""
        if not self._dialect.writes_calls:
            return _CALL_FORM.search(self.tool_description) is not None
        return parse_tool_calls(self.call_text([probe_call(PROBE, 1)])) == [ToolCall(PROBE, {"number": 1})]

    @cached_property
    def _names_calls(self) -> bool:
        """True if what the template writes behind a result, or whether it does, depends on the call."""
        if not self._dialect.writes_calls:
            return False
        result = Message(role="tool", content=PROBE, tool_call_id=call_id(0))
        seen = set()
        for calls in ([], [probe_call("one")], [probe_call("two")]):
            try:
                seen.add(self._after([QUESTION], _called_by(calls), [result])[0])
            except EnvResultError:
                seen.add("")
        return len(seen) > 1

    def _encode_text(self, role: str, text: str, last_id: int, system: str) -> list[int]:
        """As `_encode_next` for one text: the first of its ways, of which all but the text is kept; the others if that loses the text."""
        table = [""]
        marked = self.protect(text, table)
        before, normal = self._opening(role, system)
        new = self._dialect.finished([Message(role=normal, content=marked)])
        try:
            rendered = self.template.render([*before, *new], add_generation_prompt=True)
        except ChatTemplateError:
            rendered = ""
        _, found, rest = rendered.rpartition(_ANSWER)
        if not found or marked.strip() not in rest:
            return self._encode_next([Message(role=role, content=text)], last_id, _system_of(system))
        self.forms["assistant", normal] = FAITHFUL
        return self._behind(self.encode_marked(rest, table), last_id)

    def _find_opening(self, role: str, system: str) -> tuple[list[dict[str, Any]], str]:
        """The chat before a text of this role, as it is rendered, and the role that the text gets."""
        (message,) = self._dialect.normal([Message(role=role, content="")])
        return self._dialect.finished([*self._head(system), _called_by([])]), message["role"]

    def _encode_next(self, messages: Messages, last_id: int, history: Messages) -> list[int]:
        calls = self._calls(messages, history)
        messages = self._dialect.normal([Message(role="assistant", content="", tool_calls=calls), *messages] if calls else messages)
        messages = messages[1:] if calls else messages
        if not self._dialect.writes_calls or (history and history[0].get("tools") and not self.describes_tools):
            messages, calls = forms.calls_as_text(messages), []
        system = self._system_text(history)
        heads = [self._head(system), self._head("")] if system else [self._head("")]
        problem: EnvResultError | None = None
        for name, own, new in _appended(calls, messages):
            for before in heads:
                try:
                    rest, table = self._after(before, _called_by(own), new)
                except EnvResultError as error:
                    problem = problem or error
                    continue
                self.forms[("assistant", *(message["role"] for message in messages))] = name
                return self._behind(self.encode_marked(rest, table), last_id)
        raise problem or ChatTemplateError(f"{self.template.name} takes no messages behind an answer")

    def _behind(self, ids: list[int], last_id: int) -> list[int]:
        """Tokens behind a turn without those that the turn itself ended with."""
        places = (place for place, token in enumerate(ids) if token in self._control_ids)
        for place in islice(places, max(1, len(self._closings))):
            if ids[place] in (last_id, self._closes.get(last_id)):
                return ids[place + 1 :]
        return ids

    def _after(self, before: Messages, answer: Message, new: Messages) -> tuple[str, list[str]]:
        """The text behind an answer that new messages follow, in which nothing of them is lost, and what its marks stand for."""
        table = [""]
        marked = [self.protect(message, table) for message in new]
        rendered = self._render([*before, answer, *marked])
        _, found, rest = rendered.rpartition(_ANSWER)
        if not found:
            raise ChatTemplateError(f"{self.template.name} leaves out an earlier turn of the assistant, so turns cannot be appended")
        if calls := answer.get("tool_calls"):
            body = self._bodies(json.dumps([before, calls]))
            if body is None or not rest.startswith(body):
                raise ChatTemplateError(f"{self.template.name} writes the calls of a turn otherwise when messages follow it")
            rest = rest[len(body) :]
        self._check(rest, marked)
        return rest, table

    def _body(self, chat: str) -> str | None:
        """The text from the last argument of an answer's calls to the end of its turn; `None` if the template leaves out the argument."""
        earlier, calls = json.loads(chat)
        _, found, rest = self._render([*earlier, _called_by(calls)], opens_turn=False).rpartition(_ANSWER)
        ends = [place for end in self._ends if (place := rest.rfind(end)) >= 0]
        return (rest[: max(ends)] if ends else rest) if found else None

    def _calls(self, messages: Messages, history: Messages) -> list[dict[str, Any]]:
        """The calls that results answer: those of the turn before them, else as many, with the names that the results have."""
        results = [message for message in messages if message["role"] == "tool"]
        if not results or messages[0]["role"] != "tool" or (len(results) == 1 and not self._names_calls):
            return []
        if history and (known := history[-1].get("tool_calls")):
            return [dict(call) for call in known]
        names = [result.get("name", "") for result in results]
        if not all(names) and history and isinstance(text := history[-1]["content"], str):
            written = [call.name for call in parse_tool_calls(text) if isinstance(call, ToolCall)]
            names = [name or own for name, own in zip(names, [*written, *[""] * len(names)], strict=False)]
        ids = [result.get("tool_call_id") or call_id(place) for place, result in enumerate(results)]
        return [{**probe_call(name or PROBE), "id": own} for name, own in zip(names, ids, strict=True)]

    def _system_text(self, history: Messages) -> str:
        """The text of the system message of a chat, which some templates open turns by; "" if there is none."""
        if history and history[0]["role"] in SYSTEM and isinstance(text := history[0]["content"], str):
            return text
        return self._system_prompt

    def _written(self, chat: Messages, tools: Sequence[Any]) -> tuple[str, list[str]]:
        """A chat in the first form that the template takes and of which nothing is lost, and what its marks stand for."""
        problem: EnvResultError | None = None
        for name, form in forms.forms(chat, calls=self._dialect.writes_calls):
            table = [""]
            marked = [self.protect(message, table) for message in form]
            try:
                rendered = self._render(marked, self.protect(tools, table))
                self._check(rendered, marked)
            except EnvResultError as error:
                problem = problem or error
                continue
            self.forms[tuple(message["role"] for message in chat)] = name
            return rendered, table
        raise problem or ChatTemplateError(f"{self.template.name} takes no such messages")

    def _check(self, rendered: str, messages: Messages) -> None:
        if self.template.exists and (what := forms.lost(rendered, messages)):
            remedy = "Give another template with --chat-template FILE, or for tools another --tool-parser"
            raise ChatTemplateError(f"{self.template.name} leaves out {what}. {remedy}")

    def decode_action(self, ids: Sequence[int]) -> str:
        """Text of a sampled turn without its end token."""
        ended = len(ids) > 0 and int(ids[-1]) in self.end_token_ids
        return self.decode(ids[:-1] if ended else ids)

    def decode_answer(self, ids: Sequence[int], tools: Sequence[Any]) -> str:
        """Text of a sampled turn as user code reads it; its calls of the tools are found if the model has a form of its own for them."""
        text = self.decode_action(ids)
        if not tools or not self._template_tools:
            return text
        return ParsedText(text, [call_of(name, arguments) for name, arguments in self.parser.parse(text, tools).calls])

    def _render(self, chat: Messages, tools: Sequence[Any] = (), *, opens_turn: bool = True) -> str:
        return self.template.render(self._dialect.finished(chat), tools, add_generation_prompt=opens_turn)


def _called(name: str, value: str) -> Message:
    return Message(role="assistant", content="", tool_calls=[probe_call(name, value)])


def _called_by(calls: Sequence[Mapping[str, Any]]) -> Message:
    """An answer that made these calls, whose last argument is a mark, or whose text is."""
    if not calls:
        return Message(role="assistant", content=_ANSWER)
    made = [{**call, "function": {"name": call["function"]["name"], "arguments": {"number": _ANSWER}}} for call in calls]
    return Message(role="assistant", content="", tool_calls=made)


def _system_of(text: str) -> list[Message]:
    return [Message(role="system", content=text)] if text else []


def _appended(calls: Sequence[dict[str, Any]], messages: Messages) -> Iterator[tuple[str, Sequence[dict[str, Any]], Messages]]:
    """Ways of writing messages behind an answer: their name, the calls of the answer, and the messages."""
    behind = {"all its calls": calls, "its last call": calls[-1:], "no call": []}
    ways = [(name, own) for name, own in behind.items() if name != "its last call" or len(calls) > 1]
    ways = ways if calls else ways[-1:]
    for change, roles in (("as they are", ()), ("a system message as the user's", SYSTEM)):
        changed = forms.joined(messages, roles) if roles else messages
        for name, own in ways if not roles or changed != messages else ():
            yield f"{change} behind {name}", own, changed
    yield "all but the assistant's as the user's", [], forms.joined(forms.calls_as_text(messages), ("tool", *SYSTEM))
