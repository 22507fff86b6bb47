"""A tokenizer's chat template: rendered in a sandbox with a deadline, with the user's own template, variables and thinking switch."""

from __future__ import annotations

import copy
import json
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Protocol

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.core.errors import ChatTemplateError, ConfigError
from agentrl.rollout.appending import with_marks
from agentrl.rollout.template_files import read_template, template_variables

DEADLINE_S = 10.0
"""Seconds of computing that one rendering may take; an honest one takes milliseconds."""
STRIDE, PATIENCE = 1024, 64
"""Rounds of a loop that count as one step, as a call does, and steps between two looks at the clock."""
SWITCHES: Mapping[str, Mapping[str, bool]] = {
    "on": {"enable_thinking": True, "thinking": True},
    "off": {"enable_thinking": False, "thinking": False},
    "keep": {"preserve_thinking": True, "keep_past_thinking": True, "clear_thinking": False, "truncate_history_thinking": False},
}
"""Variables by which templates turn thinking on and off, and keep that of earlier turns."""
OPENING = re.compile(r"<([\w:|]*think[\w:|]*)>\s*\Z")
"""A block of thinking that a prompt opens for the model."""
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})
"""Variables that the renderer itself gives to a template."""
REMEDY = "Give another template with --chat-template FILE"


class TemplateSettings(Protocol):
    """The settings that say how chats are rendered: a section of every command that loads a model."""

    @property
    def chat_template(self) -> str:
        """File of a template instead of the tokenizer's own; empty: its own."""

    @property
    def chat_template_kwargs(self) -> str:
        """JSON object of variables for the template; empty: none."""

    @property
    def thinking(self) -> str:
        """``auto``, ``on``, ``off`` or ``keep``."""


class ChatTemplate:
    """The chat template of a tokenizer, as a function from messages to text and token ids.

    A Jinja template is rendered here, as transformers would, in a sandbox of our own whose loops and calls look at the clock, so that one
    without an end is ended. A tokenizer that renders with code of its own, or has no template, is asked itself.

    Args:
        tokenizer: A Hugging Face tokenizer, or an object with the same few methods.
        settings: The user's own template, variables and thinking switch; `None`: none of them.

    Attributes:
        source: The template; "" without one.
        options: The user's variables for it, those of the thinking switch included.

    Raises:
        ConfigError: If the template cannot be read, or has no switch for the wanted thinking.
    """

    def __init__(self, tokenizer: Any, settings: TemplateSettings | None = None) -> None:
        self._tokenizer = tokenizer
        file = settings.chat_template if settings is not None else ""
        own = getattr(tokenizer, "chat_template", None)
        self.name = f"the template {file}" if file else f"the chat template of {getattr(tokenizer, 'name_or_path', '') or 'the tokenizer'}"
        self.field, self.value = ("--chat-template", file) if file else ("--model", str(getattr(tokenizer, "name_or_path", "")))
        self._own_code = not file and _renders_itself(tokenizer)
        sources = {"default": read_template(file)} if file else own if isinstance(own, Mapping) else {"default": own} if own else {}
        self._sources = {name: str(source) for name, source in sources.items()}
        self._compiled = {} if self._own_code else {name: self._compile(source) for name, source in sources.items()}
        self.source = "".join(str(source) for source in sources.values())
        self.options = {} if settings is None else self._switched(settings.thinking) | template_variables(settings.chat_template_kwargs)
        self._variables: dict[str, Any] = {**(getattr(tokenizer, "special_tokens_map", None) or {}), **self.options}

    @property
    def exists(self) -> bool:
        """True if there is a template; without one contents are joined by line breaks."""
        return self._own_code or bool(self._compiled)

    def with_variables(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """Return the same template with further variables, or itself if it reads none of them or has them already.

        Raises:
            ChatTemplateError: If one of them is not the caller's to give.
        """
        fixed = RESERVED | set(getattr(self._tokenizer, "special_tokens_map", None) or ())
        if strange := sorted(fixed & variables.keys()):
            raise ChatTemplateError(f"{strange[0]} is no variable that may be given to {self.name}")
        names = variables if self._own_code else variables.keys() & (variables_of(self.source) if self.source else set())
        changes = {name: variables[name] for name in names if name not in self.options or self.options[name] != variables[name]}
        if not changes:
            return self
        changed = copy.copy(self)
        changed.options, changed._variables = {**self.options, **changes}, {**self._variables, **changes}
        return changed

    def with_marks(self) -> ChatTemplate | None:
        """Return the template with marks between messages; `None` for one that does not write one message after the other."""
        if not self._compiled:
            return None
        marked = {name: _compile_marked(source) for name, source in self._sources.items()}
        if any(each is None for each in marked.values()):
            return None
        changed = copy.copy(self)
        changed._compiled = {name: each for name, each in marked.items() if each is not None}
        return changed

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **options: Any) -> str:
        """Text of a chat as the template writes it.

        Args:
            messages: The chat, in a form that the template takes.
            tools: JSON schemas of the tools that it is to describe.
            **options: Variables for this rendering; ``add_generation_prompt=True`` opens the model's turn behind the messages.

        Raises:
            ChatTemplateError: If the template refuses the messages, or finds no end.
        """
        if not self.exists:
            return "".join(plain_text(message.get("content")) + "\n" for message in messages)
        variables = {**self._variables, "add_generation_prompt": False, **options}
        try:
            if self._own_code:
                given = {key: value for key, value in variables.items() if key not in (self._tokenizer.special_tokens_map or {})}
                return str(self._tokenizer.apply_chat_template(list(messages), tools=list(tools or ()) or None, tokenize=False, **given))
            with _CLOCK.limited():
                chosen = self._chosen(bool(tools))
                return chosen.render(messages=list(messages), tools=list(tools or ()) or None, documents=None, **variables)
        except Exception as error:  # templates raise errors of their own, and any error of the values they touch
            roles = ", ".join(str(message.get("role")) for message in messages)
            problem = f"{self.name} refuses messages of the roles {roles}: {error or type(error).__name__}"
            raise ChatTemplateError(f"{problem}. {REMEDY}, or write other messages") from error

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **options: Any) -> list[int]:
        """Token ids of a chat as the template writes it; arguments and errors are those of `render`."""
        return list(self._tokenizer(self.render(messages, tools, **options), add_special_tokens=False).input_ids)

    def _chosen(self, has_tools: bool) -> Template:
        """The template for a chat, where the tokenizer has several by name."""
        name = "tool_use" if has_tools and "tool_use" in self._compiled else "default"
        if name not in self._compiled:
            raise TemplateError(f"there are templates with the names {', '.join(self._compiled)}, and none is the default")
        return self._compiled[name]

    def _compile(self, source: str) -> Template:
        try:
            return _compile(source)
        except TemplateSyntaxError as error:
            problem = f"line {error.lineno} of its chat template is no valid Jinja: {error.message}"
            raise ConfigError(self.field, self.value, problem, f"Correct it. {REMEDY}.") from error

    def _switched(self, thinking: str) -> dict[str, bool]:
        """The template's own variables for a setting of ``--thinking``."""
        wanted = SWITCHES.get(thinking, {})
        found = {name: value for name, value in wanted.items() if self._own_code or name in variables_of(self.source)}
        if wanted and not found:
            problem = f"{self.name} has none of the switches that this setting knows: {', '.join(wanted)}"
            raise ConfigError("--thinking", thinking, problem, "Use auto, or its own variable with --chat-template-kwargs.")
        return found


def plain_text(content: Any) -> str:
    """Text of a message's content: a text, parts of which some have one, or nothing."""
    if isinstance(content, list | tuple):
        return "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)
    return "" if content is None else str(content)


@lru_cache(maxsize=64)
def variables_of(source: str) -> frozenset[str]:
    """Return the names that a template reads and does not set."""
    return frozenset(find_undeclared_variables(_ENVIRONMENT.parse(source)))


class _Clock(threading.local):
    """Processor time that is left to the rendering of this thread, which other busy processes do not use up."""

    end_s, steps = float("inf"), 0  # `end_s` is 0 until the first look at the clock, which short renderings never take

    def limited(self) -> _Clock:
        """The clock itself, as a context in which the deadline runs."""
        return self

    def __enter__(self) -> None:
        self.end_s, self.steps = 0.0, 0

    def __exit__(self, *_: object) -> None:
        self.end_s = float("inf")

    def step(self) -> None:
        """Count a step; `TimeoutError` if the time is over."""
        self.steps += 1
        if self.steps % PATIENCE:
            return
        now = time.thread_time()
        self.end_s = self.end_s or now + DEADLINE_S
        if now > self.end_s:
            raise TimeoutError(f"it has not ended after {DEADLINE_S:g} seconds, so a loop of it seems to have no end")


_CLOCK = _Clock()
LIMITED = "_limited"
"""Filter around what loops go through."""
_DICT = frozenset(dir(dict))
_LOOP = frozenset({"first", "last", "index", "index0", "previtem", "nextitem"})


def _limited(items: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop, with a look at the clock before the first and now and then."""
    for number, item in enumerate(items):
        if not number % STRIDE:
            _CLOCK.step()
        yield item


class _Guards(Extension):
    """Reads the tag that marks what a model wrote, which transformers knows, as its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox that chat templates are written for, in which every loop and call looks at the clock."""

    def __init__(self) -> None:
        # The options of transformers, for which chat templates are written.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Guards, "jinja2.ext.loopcontrols"])
        # Jinja's own filter writes some characters as HTML wants them.
        self.filters["tojson"] = _to_json
        self.filters[LIMITED] = _limited
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, LIMITED, [], [], None, None, lineno=loop.lineno)
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up a name in a value, in a dictionary without an exception for what is a key of it, and in a loop at once."""
        if type(obj) is LoopContext and attribute in _LOOP:
            return getattr(obj, attribute)
        if type(obj) is dict and attribute not in _DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or macro for a template."""
        _CLOCK.step()
        return super().call(__context, __obj, *args, **kwargs)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _renders_itself(tokenizer: Any) -> bool:
    """Return True if a tokenizer renders chats with code of its own instead of a template that transformers renders."""
    method = getattr(type(tokenizer), "apply_chat_template", None)
    return method is not None and not str(method.__module__).startswith("transformers.tokenization_utils")


_ENVIRONMENT = _Environment()


@lru_cache(maxsize=64)
def _compile(source: str) -> Template:
    compiled = _ENVIRONMENT.from_string(source)
    compiled.globals = dict(compiled.globals)  # a chain of maps, which every rendering would copy, takes as long as the rendering
    return compiled


@lru_cache(maxsize=64)
def _compile_marked(source: str) -> Template | None:
    tree = with_marks(_ENVIRONMENT.parse(source), LIMITED)
    if tree is None:
        return None
    compiled = _ENVIRONMENT.from_string(tree)
    compiled.globals = dict(compiled.globals)
    return compiled
