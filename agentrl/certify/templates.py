"""Chats as a model reads them here, compared token by token with what transformers makes of the same messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from agentrl.certify.results import Comparison, Verdict
from agentrl.core.errors import AgentRLError, ConfigError, EnvResultError
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import Message
from agentrl.engine.parsers import fit_parser
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.endpoint.neutral import EchoedMessage
from agentrl.rollout.forms import REASONING, Dialect, probe_call
from agentrl.rollout.plan import EndpointConfig
from agentrl.rollout.template import ChatTemplate, TemplateSettings

PART = "template"
FAITHFUL = "as they are"
"""Name of the form in which nothing is changed."""

_ASKED, _AGAIN = Message(role="user", content="What is one plus two?"), Message(role="user", content="And two plus two?")
_ANSWER = Message(role="assistant", content="Three.")
_THOUGHT = EchoedMessage(role="assistant", content="Three.", reasoning_content="One and two.")
_CALLED = Message(role="assistant", content="", tool_calls=[probe_call("add", 17)])
_BOTH = Message(role="assistant", content="", tool_calls=[probe_call("add", 17), probe_call("sub", 18, 1)])
_RESULTS = [
    Message(role="tool", content=f"RESULT-{place}", name=name, tool_call_id=f"c{place:08d}") for place, name in ((0, "add"), (1, "sub"))
]
DIALOGUES: Mapping[str, Sequence[Message]] = {
    "system message": [Message(role="system", content="Be brief."), _ASKED],
    "several turns": [_ASKED, _ANSWER, _AGAIN],
    "call and result": [_ASKED, _CALLED, _RESULTS[0]],
    "two results out of order": [_ASKED, _BOTH, _RESULTS[1], _RESULTS[0]],
    "thinking": [_ASKED, _THOUGHT, _AGAIN],
    "later system message": [_ASKED, _ANSWER, Message(role="system", content="Be quick."), _AGAIN],
}
"""Chats that a template is tried on, by name."""


def compare_template(model: str, settings: TemplateSettings, *, trust_remote_code: bool = False) -> list[Comparison]:
    """Compare prompts that environments and clients would get with the chat template's own rendering of their messages.

    Args:
        model: Directory of the tokenizer, or name of one on the hub.
        settings: The user's template, variables and thinking switch.
        trust_remote_code: Let the tokenizer's own code run.
    """
    from transformers import GenerationConfig

    try:
        tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    except ConfigError as error:
        return [_untried("turn ends", error.problem)]
    known: Any = None
    with suppress(OSError):
        known = GenerationConfig.from_pretrained(model).eos_token_id
    return compare_renderings(tokenizer, settings, known if isinstance(known, list) else [] if known is None else [known])


def compare_renderings(tokenizer: Any, settings: TemplateSettings, end_token_ids: Sequence[int] = ()) -> list[Comparison]:
    """Compare the template of a tokenizer that is loaded; see `compare_template`.

    Args:
        tokenizer: The model's own, of transformers.
        settings: The user's template, variables and thinking switch.
        end_token_ids: The tokens that the model's configuration ends a turn with.
    """
    try:
        codec = ChatCodec(tokenizer, end_token_ids=end_token_ids, template=ChatTemplate(tokenizer, settings))
    except ConfigError as error:
        return [_untried("turn ends", error.problem)]
    ends = ", ".join(map(str, tokenizer.convert_ids_to_tokens(list(codec.end_token_ids))))
    if not codec.template.exists:
        return [_untried("turn ends", f"the tokenizer has no chat template; texts end with {ends}")]
    found = [_compared(codec, tokenizer, name, dialogue) for name, dialogue in DIALOGUES.items()]
    return [Comparison(part=PART, name="turn ends", verdict=Verdict.EXACT, reason=f"proven: {ends}"), *found, _calls_parsed(codec)]


def _calls_parsed(codec: ChatCodec) -> Comparison:
    """Have made-up tool calls written by the template and read by the parser that a run would choose."""
    if problem := fit_parser(codec, EndpointConfig()):
        asked = "the template asks for" if codec.describes_tools else "the system message asks for"
        return _untried("tool calls", f"{problem}; {asked} JSON")
    return Comparison(part=PART, name="tool calls", verdict=Verdict.EXACT, reason=f"read by the parser {codec.tool_parser}")


def _compared(codec: ChatCodec, tokenizer: Any, name: str, dialogue: Sequence[Message]) -> Comparison:
    try:
        ids = codec.encode_chat(dialogue)
    except EnvResultError as error:
        return _untried(name, str(error))
    if form := _changed(codec, dialogue):
        return _untried(name, f"the template does not write it; sent with {form}")
    if ids in _renderings(codec.template, tokenizer, dialogue):
        return Comparison(part=PART, name=name, verdict=Verdict.EXACT)
    return Comparison(
        part=PART,
        name=name,
        verdict=Verdict.WRONG,
        reason="other tokens than those of transformers",
        remedy="Give another template with --chat-template FILE.",
    )


def _changed(codec: ChatCodec, dialogue: Sequence[Message]) -> str:
    """Return in which other form a dialogue that was encoded got to the template; "" for its own."""
    form = codec.forms[tuple(message["role"] for message in codec.dialect.normal(dialogue))]
    if form != FAITHFUL:
        return form
    if any(message.get("tool_calls") for message in dialogue):
        return "calls as text" if not codec.dialect.writes_calls else "" if codec.dialect.writes_results else "results as the user's"
    return ""


def _renderings(template: ChatTemplate, tokenizer: Any, dialogue: Sequence[Message]) -> list[list[int]]:
    """Return what transformers makes of a dialogue in each form of content, arguments and thinking that templates read."""
    found, options = [], {**template.options, "chat_template": template.source if template.field == "--chat-template" else None}
    for parts, json_arguments, no_content in product((False, True), repeat=3):
        for reasoning in (*REASONING, ""):
            form = Dialect(parts=parts, json_arguments=json_arguments, no_content=no_content, reasoning=reasoning)
            chat = form.finished(form.normal(dialogue))
            with suppress(Exception):  # a template refuses forms with errors of its own, and any error of the values they touch
                text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **options)
                found.append(list(tokenizer(text, add_special_tokens=False).input_ids))
    return found


def _untried(name: str, error: AgentRLError | str) -> Comparison:
    return Comparison(part=PART, name=name, verdict=Verdict.UNTRIED, reason=str(error))
