"""Rows of a data set as examples of one form: chats, pairs, labelled answers, labelled steps. Loads no model library."""

from __future__ import annotations

import difflib
import itertools
import json
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from agentrl.config.tune import (
    DialogueDataConfig,
    LabelledDataConfig,
    PairsDataConfig,
    RewardDataConfig,
    SftDataConfig,
    StepsDataConfig,
    TuneDataConfig,
)
from agentrl.core.types import Message, Prompt, as_messages
from agentrl.rollout.forms import REASONING
from agentrl.rollout.template import plain_text
from agentrl.tune.columns import Row, RowError, history, is_given, is_list, is_trained, opened, parts_of, read_marks, with_images, with_role

LEAVE_OUT = "Leave such rows out, or skip them with --bad-rows skip."


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """An example of a data set, with the file or name of the set and the line; examples with the same contents are equal."""

    source: str = field(default="", compare=False, repr=False)
    where: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Chat(Located):
    """A dialogue; the answers of the assistant are trained."""

    messages: tuple[Message, ...]
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer(Located):
    """A prompt and the answer to it."""

    prompt: Prompt
    answer: Message
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Text(Located):
    """Plain text, trained whole."""

    text: str


@dataclass(frozen=True, slots=True)
class Pair(Located):
    """Two answers to a prompt, of which one is preferred."""

    prompt: Prompt
    chosen: Message
    rejected: Message
    margin: float | None = None
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Labelled(Located):
    """An answer that is desirable or not."""

    prompt: Prompt
    answer: Message
    label: bool
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Steps(Located):
    """An answer in steps, with the probability that each is good."""

    prompt: Prompt
    steps: tuple[str, ...]
    labels: tuple[float, ...]


Example: TypeAlias = Chat | Answer | Text | Pair | Labelled | Steps


def dialogue(row: Row, data: DialogueDataConfig) -> list[Example]:
    """Return the example of a row with a chat, a prompt with a completion, or a text.

    Raises:
        RowError: If it holds none of them, or a malformed one.
    """
    form = data.form if data.form != "auto" else _form_of(row, data)
    if form == "chat":
        key = data.messages_key if is_given(row.get(data.messages_key)) or "conversations" not in row else "conversations"
        value, images = with_images(opened(_column(row, key), row, data), row, key)
        messages = _messages(value, key, images=bool(images))
        _check_turns(messages, key)
        return [Chat(tuple(_with_quality(messages, row, data)), images)]
    if form == "completion":
        prompt, images = _prompt(row, data)
        prompt = _with_quality(prompt, row, data)
        answer = _answer(_column(row, data.completion_key), data.completion_key)
        if history(row, data):  # its answers are learned too, as LLaMA-Factory and ms-swift document for this column
            return [Chat((*as_messages(prompt), answer), images)]
        return [Answer(prompt, answer, images)]
    return [Text(_text(row, data.text_key))]


def _form_of(row: Row, data: DialogueDataConfig) -> str:
    if is_given(row.get(data.messages_key)) or is_given(row.get("conversations")):
        return "chat"
    if data.completion_key in row:
        return "completion"
    if data.text_key in row:
        return "text"
    if data.messages_key in row or "conversations" in row:
        return "chat"
    keys = f"--messages-key {data.messages_key}, --completion-key {data.completion_key} nor --text-key {data.text_key}"
    raise RowError(data.messages_key, f"is missing: the row has neither {keys}", f"Its columns are {', '.join(row)}.")


def pair(row: Row, data: PairsDataConfig) -> list[Pair]:
    """Return the pair of a row; without a prompt, its two chats begin alike and differ in the last message.

    Raises:
        RowError: If a column is missing or malformed, or the two answers are the same.
    """
    chosen, rejected = _column(row, data.chosen_key), _column(row, data.rejected_key)
    if data.prompt_key in row:
        prompt, images = _prompt(row, data)
    else:
        prompt, images, chosen, rejected = _common_beginning(chosen, rejected, row, data)
    good = _answer(_without(prompt, chosen), data.chosen_key)
    bad = _answer(_without(prompt, rejected), data.rejected_key)
    if good == bad:
        raise RowError(data.rejected_key, f"is the same as column {data.chosen_key!r}", "Leave out pairs without a preference.")
    margin = _number(row, data.margin_key) if isinstance(data, RewardDataConfig) and data.margin_key else None
    return [Pair(prompt, good, bad, margin, images)]


CELLS = {"true": True, "false": False, "1": True, "0": False}
"""Text of a label in a table -> the label."""


def labelled(row: Row, data: LabelledDataConfig) -> list[Example]:
    """Return the labelled answer of a row, or the two of a row with a pair.

    Raises:
        RowError: If a column is missing or malformed.
    """
    if data.completion_key not in row and data.chosen_key in row:
        found = pair(row, data)[0]
        answers = ((found.chosen, True), (found.rejected, False))
        return [Labelled(found.prompt, answer, label, found.images) for answer, label in answers]
    label = _column(row, data.label_key)
    label = CELLS.get(label.lower(), label) if isinstance(label, str) else label
    if label not in (True, False):  # 0 and 1 count, as other tools write them
        raise RowError(data.label_key, f"is neither true nor false: {label!r:.80}")
    prompt, images = _prompt(row, data)
    return [Labelled(prompt, _answer(_column(row, data.completion_key), data.completion_key), bool(label), images)]


def steps(row: Row, data: StepsDataConfig) -> list[Example]:
    """Return the labelled steps of a row.

    Raises:
        RowError: If a column is missing or malformed, or there are not as many labels as steps.
    """
    texts, labels = _column(row, data.steps_key), _column(row, data.label_key)
    if not is_list(texts) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise RowError(data.steps_key, f"is no list of texts: {texts!r:.80}")
    if not is_list(labels) or len(labels) != len(texts):
        raise RowError(data.label_key, f"is no list of {len(texts)} labels, one for each step: {labels!r:.80}")
    for label in labels:
        if not isinstance(label, numbers.Real) or not 0 <= float(label) <= 1:
            raise RowError(data.label_key, f"holds {label!r:.80}, which is neither true, false nor a number from 0 to 1")
    prompt, images = _prompt(row, data)
    if images:
        raise RowError(data.prompt_key, f"has {len(images)} images", "Steps are labelled on text alone.")
    return [Steps(prompt, tuple(texts), tuple(map(float, labels)))]


def _column(row: Row, key: str) -> Any:
    if key in row and row[key] is not None:
        return row[key]
    if key in row:
        raise RowError(key, "is empty")
    close = difflib.get_close_matches(key, list(row), n=1)
    raise RowError(key, "is missing", f"Did you mean {close[0]}?" if close else f"Its columns are {', '.join(row)}.")


def _text(row: Row, key: str) -> str:
    value = _column(row, key)
    if not isinstance(value, str) or not value:
        raise RowError(key, f"is no text: {value!r:.80}")
    return value


def _number(row: Row, key: str) -> float:
    value = _column(row, key)
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise RowError(key, f"is no number: {value!r:.80}")
    return float(value)


def _prompt(row: Row, data: TuneDataConfig) -> tuple[Prompt, tuple[str, ...]]:
    """Return the prompt of a row, a chat if it has images, and these."""
    key = data.prompt_key
    value = _column(row, key)
    if isinstance(value, str):
        if not value:
            raise RowError(key, "is an empty text")
        value = data.input_template.format(value) if data.input_template else value
    value, images = with_images(opened(value, row, data), row, key)
    if isinstance(value, str):
        return value, ()
    messages = _messages(value, key, images=bool(images))
    if messages[-1]["role"] == "assistant":
        raise RowError(key, "ends with a message of the assistant, where the answer is to begin")
    return messages, images


def _messages(value: Any, key: str, *, images: bool = False) -> list[Message]:
    """Return chat messages, also those of the ShareGPT form (``from`` and ``value``), and with `images` those with parts for images."""
    if not is_list(value) or not value:
        raise RowError(key, f"is no list of messages: {value!r:.80}")
    found: list[Message] = []
    for index, item in enumerate(value):
        item = with_role(item, index, key)
        if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
            raise RowError(key, f"holds no message with role and content at place {index}: {item!r:.80}")
        found.append(_message(item, index, key, images=images))
    return found


def _message(item: Mapping[str, Any], index: int, key: str, *, images: bool) -> Message:
    """Return a message whose content is text and whose calls have objects as arguments."""
    message = {name: part for name, part in item.items() if part is not None}
    place = f"at place {index}"
    if "function_call" in message:
        raise RowError(key, f"holds a message with function_call {place}, which templates leave out", "Write it as tool_calls.")
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_call(call, place, key) for call in (calls if is_list(calls) else [calls])]
    content: Any = message.get("content", "" if calls else None)
    if not (images and item["role"] != "assistant" and any(part == {"type": "image"} for part in parts_of(item))):
        content = _content(content, place, key)
    if content is None:
        raise RowError(key, f"holds a message of {item['role']} whose content is no text, {place}: {item.get('content')!r:.80}")
    if not (content or calls):
        raise RowError(key, f"holds an empty message of {item['role']} {place}", LEAVE_OUT)
    read_marks(message, place, key)
    for name in REASONING:
        if not isinstance(message.get(name, ""), str):
            raise RowError(key, f"holds a message whose {name} is no text, {place}: {message[name]!r:.80}")
    return {**message, "content": content}  # type: ignore[typeddict-item]


def _content(value: Any, place: str, key: str) -> str | None:
    """Return content as text, also that of a list of parts; `None` if it is none."""
    if isinstance(value, str):
        return value
    if not is_list(value):
        return None
    for part in value:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RowError(key, f"holds a message with a part of the type {kind} {place}", "Text alone is trained.")
    return plain_text(value)


def _call(call: Any, place: str, key: str) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, which most templates take."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError(key, f"holds a tool call without the name of a function, {place}: {call!r:.80}")
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise RowError(key, f"holds a call of {function['name']} whose arguments are not JSON, {place}: {error}") from error
    if not isinstance(arguments, Mapping):
        raise RowError(key, f"holds a call of {function['name']} whose arguments are no object, {place}: {arguments!r:.80}")
    named = {"id": call["id"]} if call.get("id") else {}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}


def _check_turns(messages: Sequence[Message], key: str) -> None:
    """Check that a chat begins with something to answer, and that no answer follows another."""
    roles = [message["role"] for message in messages]
    if roles[0] == "assistant":
        raise RowError(key, "begins with a message of the assistant", "Begin with one of the user or the system.")
    if roles[-1] != "assistant":
        raise RowError(key, f"ends with a message of {roles[-1]}, which nothing answers", "End with a message of the assistant.")
    if any(first == second == "assistant" for first, second in itertools.pairwise(roles)):
        raise RowError(key, "holds two messages of the assistant in a row", "Join them.")
    if not any(map(is_trained, messages)):
        raise RowError(key, "holds no answer to train: all are marked not to be", LEAVE_OUT)


def _answer(value: Any, key: str) -> Message:
    if isinstance(value, str):
        if not value:
            raise RowError(key, "is an empty text", LEAVE_OUT)
        return Message(role="assistant", content=value)
    messages = _messages(value, key)
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        roles = ", ".join(message["role"] for message in messages)
        raise RowError(key, f"holds messages of {roles}", "Give one message of the assistant after the prompt.")
    if not is_trained(messages[0]):
        raise RowError(key, "holds an answer that is marked not to be trained", LEAVE_OUT)
    return messages[0]


def _without(prompt: Prompt, value: Any) -> Any:
    """Return a chat without the prompt that it repeats, as some data sets have it; what has a column of its own may not be repeated."""
    if isinstance(prompt, str) or not is_list(value):
        return value
    for start in range(len(prompt)):
        asked = prompt[start:]
        pairs = zip(value, asked, strict=False)
        if len(value) > len(asked) and all(
            isinstance(a, Mapping) and _text_of(a.get("content")) == _text_of(b["content"]) for a, b in pairs
        ):
            return list(value[len(asked) :])
    return value


def _text_of(content: Any) -> str:
    return content if isinstance(content, str) else plain_text(content if is_list(content) else None)


def _common_beginning(chosen: Any, rejected: Any, row: Row, data: PairsDataConfig) -> tuple[Prompt, tuple[str, ...], Any, Any]:
    """Return the prompt that two chats share, its images, and what follows it in each."""
    if not is_list(chosen) or not is_list(rejected):
        raise RowError(data.prompt_key, "is missing, and the answers are no chats that could hold the prompt", "Name it with --prompt-key.")
    chosen, images = with_images(opened(chosen, row, data), row, data.chosen_key)
    rejected, others = with_images(opened(rejected, row, data), row, data.rejected_key)
    if images != others:
        raise RowError(data.rejected_key, f"has other images than column {data.chosen_key!r}", "Give both answers to the same pictures.")
    first = _messages(chosen, data.chosen_key, images=bool(images))
    second = _messages(rejected, data.rejected_key, images=bool(images))
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first[:-1], second[:-1], strict=False))
    if not (length := len([*alike])):
        problem = f"does not begin as column {data.chosen_key!r}, and there is no prompt"
        raise RowError(data.rejected_key, problem, "Name it with --prompt-key.")
    return first[:length], images, first[length:], second[length:]


def _with_quality(prompt: Any, row: Row, data: DialogueDataConfig) -> Any:
    """Write the quality of a row into its prompt, or into the last message of the user."""
    if not isinstance(data, SftDataConfig) or not data.quality_key:
        return prompt
    quality = _column(row, data.quality_key)
    if not isinstance(quality, str | numbers.Real):
        raise RowError(data.quality_key, f"is neither a number nor a word: {quality!r:.80}")
    if isinstance(prompt, str):
        return data.quality_template.format(prompt=prompt, quality=quality)
    last = max((index for index, message in enumerate(prompt) if message["role"] == "user"), default=None)
    if last is None:
        raise RowError(data.quality_key, "cannot be written anywhere: the chat has no message of the user")
    content = data.quality_template.format(prompt=prompt[last]["content"], quality=quality)
    return [*prompt[:last], {**prompt[last], "content": content}, *prompt[last + 1 :]]


PARSERS = {"dialogue": dialogue, "pairs": pair, "labelled": labelled, "steps": steps}
"""Form of the rows -> function that makes examples of one row."""
