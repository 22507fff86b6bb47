"""Examples as token ids, made as reinforcement learning makes them: the template up to an answer, then the answer's own tokens.

`agentrl.rollout.chat.ChatCodec` renders prompts and what stands between turns, so a trained answer begins where a sampled one does, and
ends with the token that ends a sampled one. What is trained follows from where tokens come from, not from marks in a template.
"""

from __future__ import annotations

import bisect
import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from agentrl.core.errors import DataError, EnvResultError
from agentrl.core.types import Message, Prompt
from agentrl.rollout.chat import ChatCodec, encode_prompt
from agentrl.tune.forms import Answer, Chat, Example, Labelled, Pair, Steps, Text
from agentrl.tune.settings import TuneConfig

IGNORED = -100
"""Label of a token that is not trained."""

Row: TypeAlias = dict[str, Any]
"""Columns of one training row, of which `agentrl.tune.trainer.Collator` makes batches."""


@dataclass(slots=True)
class Counts:
    """Numbers of examples, rows and tokens, and what became of those that are too long."""

    examples: int = 0  # that were encoded
    rows: int = 0  # that are trained or evaluated on
    dropped: int = 0  # examples above the maximal length
    cut: int = 0  # examples that lost their end
    split: int = 0  # texts that became several rows
    tokens: int = 0  # of all rows
    trained: int = 0  # tokens with a label
    longest: int = 0  # tokens of the longest row


class Encoder:
    """Encodes the examples of a run and counts what is cut.

    Args:
        codec: The model's chat template and tokenizer.
        config: Settings of the run.
    """

    def __init__(self, codec: ChatCodec, config: TuneConfig) -> None:
        self._codec, self._data = codec, config.data
        self._max, self._overlong = config.data.max_length, config.data.overlong
        self._train_on = getattr(config.method, "train_on", "answers")
        self._separator = codec.encode_plain(getattr(config.method, "step_separator", "\n"))
        self._last_step_only = getattr(config.method, "last_step_only", False)
        end = codec.tokenizer.eos_token_id
        self._text_end = [] if end is None else [end]
        self.counts = Counts()

    def encode(self, examples: Iterable[Example], flag: str = "--data") -> list[Row]:
        """Return the rows of `examples`, in their order.

        Raises:
            DataError: If the chat template refuses one, or no row is left.
        """
        rows: list[Row] = []
        for example in examples:
            self.counts.examples += 1
            try:
                found = self._example(example)
            except EnvResultError as error:
                raise DataError(flag, _shown(example), str(error), "Give messages that the model's template takes.") from error
            rows += found
        if not rows:
            problem = f"leaves no row: all {self.counts.examples} have more than --max-length {self._max} tokens"
            raise DataError(flag, self._data.data, problem, "Raise --max-length, or use --overlong cut.")
        self.counts.rows += len(rows)
        return rows

    def _example(self, example: Example) -> list[Row]:
        """Return the rows of one example; none if it is too long."""
        if isinstance(example, Pair):
            return self._pair(example)
        if isinstance(example, Labelled):
            return self._labelled(example)
        ids, labels = self._steps(example) if isinstance(example, Steps) else self._dialogue(example)
        if isinstance(example, Text) and len(ids) > self._max and self._overlong == "split":
            self.counts.split += 1
            parts = [ids[at : at + self._max] for at in range(0, len(ids), self._max)]
            return [self._row(part, list(part)) for part in parts if len(part) > 1]
        kept = self._fit(len(ids), self._max)
        if all(label == IGNORED for label in labels[1:kept]):  # nothing predicts the first token
            return self._drop()
        self.counts.cut += kept < len(ids)
        return [self._row(ids[:kept], labels[:kept])]

    def _drop(self) -> list[Row]:
        self.counts.dropped += 1
        return []

    def _fit(self, length: int, room: int) -> int:
        """Return how many of `length` tokens are kept where there is room for `room`; 0 drops the row."""
        if length <= room:
            return length
        return max(room, 0) if self._overlong == "cut" else 0

    def _row(self, ids: list[int], labels: list[Any]) -> Row:
        self._count(len(ids), sum(label != IGNORED for label in labels))
        return {"input_ids": ids, "labels": labels}

    def _count(self, tokens: int, trained: int) -> None:
        self.counts.tokens += tokens
        self.counts.trained += trained
        self.counts.longest = max(self.counts.longest, tokens)

    def _text(self, text: str) -> list[int]:
        codec = self._codec
        bos = codec.tokenizer.bos_token_id
        start = [token for token in codec.tokenizer("").input_ids[:1] if token == bos]
        return start + codec.encode_text(text) + self._text_end

    def _dialogue(self, example: Chat | Answer | Text) -> tuple[list[int], list[int]]:
        if isinstance(example, Text):
            ids = self._text(example.text)
            return ids, list(ids)
        if isinstance(example, Answer):
            prompt, answer = self._prompt(example.prompt), self._answer(example.answer, example.prompt)
            ids = prompt + answer
            return ids, list(ids) if self._train_on == "all" else [IGNORED] * len(prompt) + answer
        ids, trained = encode_chat(self._codec, example.messages, last_only=self._train_on == "last")
        return ids, [token if self._train_on == "all" or mark else IGNORED for token, mark in zip(ids, trained, strict=True)]

    def _steps(self, example: Steps) -> tuple[list[int], list[float]]:
        ids = self._prompt(example.prompt)
        labels: list[float] = [IGNORED] * len(ids)
        for number, (text, label) in enumerate(zip(example.steps, example.labels, strict=True), start=1):
            step = self._codec.encode_plain(text) + self._separator
            counts = not self._last_step_only or number == len(example.steps)
            ids += step
            labels += [IGNORED] * (len(step) - 1) + [label if counts else IGNORED]
        return ids, labels

    def _pair(self, example: Pair) -> list[Row]:
        prompt, answers = self._fitted(example.prompt, example.chosen, example.rejected)
        if not answers:
            return self._drop()
        margin = {} if example.margin is None else {"margin": example.margin}
        return [{"prompt_ids": prompt, "chosen_ids": answers[0], "rejected_ids": answers[1], **margin}]

    def _labelled(self, example: Labelled) -> list[Row]:
        prompt, answers = self._fitted(example.prompt, example.answer)
        return [{"prompt_ids": prompt, "completion_ids": answers[0], "label": example.label}] if answers else self._drop()

    def _fitted(self, prompt: Prompt, *messages: Message) -> tuple[list[int], list[list[int]]]:
        """Return a prompt and the answers to it, counted and cut if need be; no answers if one of them does not fit."""
        ids, answers = self._prompt(prompt), [self._answer(message, prompt) for message in messages]
        room = self._max - len(ids)
        kept = [self._fit(len(answer), room) for answer in answers]
        if not all(kept):
            return ids, []
        self.counts.cut += any(count < len(answer) for count, answer in zip(kept, answers, strict=True))
        for count in kept:
            self._count(len(ids) + count, count)
        return ids, [answer[:count] for answer, count in zip(answers, kept, strict=True)]

    def _prompt(self, prompt: Prompt) -> list[int]:
        return encode_prompt(self._codec, prompt, apply_chat_template=self._data.apply_chat_template)

    def _answer(self, message: Message, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str) and not self._data.apply_chat_template:
            return self._codec.encode_text(message["content"]) + self._text_end
        return encode_answer(self._codec, message)


def encode_answer(codec: ChatCodec, message: Message) -> list[int]:
    """Return the tokens of an answer as the model would have sampled it, the token that ends a turn included."""
    calls = message.get("tool_calls")
    text = message["content"] + (codec.call_text(calls) if calls else "")
    return codec.encode_plain(text) + codec.turn_end_ids


def encode_chat(codec: ChatCodec, messages: Sequence[Message], *, last_only: bool = False) -> tuple[list[int], list[bool]]:
    """Return the tokens of a dialogue, and which of them answers are made of.

    A message with ``"weight": 0`` is not trained, as in OpenAI's form.

    Args:
        codec: Chat template and tokenizer.
        messages: Messages that end with one of the assistant, no two of which follow each other.
        last_only: Mark the last answer only.

    Returns:
        Token ids and marks. # [L], [L]

    Raises:
        EnvResultError: If the template refuses the messages.
    """
    ids: list[int] = []
    marks: list[bool] = []
    between: list[Message] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            between.append(message)
            continue
        given = codec.encode_next(between, ids[-1]) if ids else codec.encode_chat(between)
        answer = encode_answer(codec, message)
        trained = message.get("weight", 1) != 0 and (not last_only or index == len(messages) - 1)
        ids += given + answer
        marks += [False] * len(given) + [trained] * len(answer)
        between = []
    return ids, marks


def render(codec: ChatCodec, row: Row, *, limit: int = 600) -> str:
    """Return a row as text for a person, with what is trained between ``[[`` and ``]]``; long texts lose their middle."""
    if "chosen_ids" in row:
        prompt = codec.decode(row["prompt_ids"])
        margin = f"\nmargin   {row['margin']:g}" if "margin" in row else ""
        answers = [f"{name:<8} [[{codec.decode(row[f'{name}_ids'])}]]" for name in ("chosen", "rejected")]
        return "\n".join(_shortened(text, limit) for text in (f"prompt   {prompt}", *answers)) + margin
    if "completion_ids" in row:
        text = f"{codec.decode(row['prompt_ids'])}[[{codec.decode(row['completion_ids'])}]]"
        return f"{'desirable' if row['label'] else 'undesirable'}  {_shortened(text, limit)}"
    return _shortened(_marked(codec, row["input_ids"], row["labels"]), limit)


def _marked(codec: ChatCodec, ids: Sequence[int], labels: Sequence[Any]) -> str:
    """Return tokens as text with brackets around trained ones; a step's label, which is no token, stands behind it."""
    if any(isinstance(label, float) for label in labels):
        pieces, start = [], 0
        for place, label in enumerate(labels):
            if label != IGNORED:
                pieces.append(f"{codec.decode(ids[start : place + 1])}[[{label:g}]]")
                start = place + 1
        return "".join(pieces) + codec.decode(ids[start:])
    text, start = "", 0
    for place in range(1, len(ids) + 1):
        if place == len(ids) or (labels[place] == IGNORED) != (labels[start] == IGNORED):
            part = codec.decode(ids[start:place])
            text += part if labels[start] == IGNORED else f"[[{part}]]"
            start = place
    return text


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-(limit // 2) :]}"


def _shown(example: Example) -> str:
    return repr(example)[:120]


def fingerprint(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a hash of the contents of rows, by which a resumed run knows its data."""
    digest = hashlib.sha256()
    for row in rows:
        for name in sorted(row):
            value = row[name]
            numbers = value if isinstance(value, list) else [value]
            digest.update(name.encode())
            digest.update(array("d", map(float, numbers)).tobytes())
    return digest.hexdigest()


def pack(rows: Sequence[Row], max_length: int) -> list[Row]:
    """Put rows together into rows of at most `max_length` tokens: the longest first, each where the least room is left that it fits into.

    The column ``seq_lengths`` says where rows begin, so that positions start again and rows do not attend to each other.
    """
    bins: list[list[Row]] = []
    room: list[tuple[int, int]] = []  # room left in each bin, and its number, ascending
    for row in sorted(rows, key=lambda row: -len(row["input_ids"])):
        length = len(row["input_ids"])
        at = bisect.bisect_left(room, (length, -1))
        if at == len(room):
            bins.append([])
            left, number = max_length, len(bins) - 1
        else:
            left, number = room.pop(at)
        bins[number].append(row)
        bisect.insort(room, (left - length, number))
    return [
        {
            "input_ids": [token for row in each for token in row["input_ids"]],
            "labels": [label for row in each for label in row["labels"]],
            "seq_lengths": [len(row["input_ids"]) for row in each],
        }
        for each in bins
    ]
