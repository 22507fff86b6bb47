"""Examples as token ids: the prompt that the chat template writes, then the answer as it writes it, with the token that ends it.

A trained answer begins where a sampled one does. What is trained follows from where tokens come from, not from marks in a template. A
template that writes earlier turns in another way once a later one follows gives each such answer a row of its own.
"""

from __future__ import annotations

import bisect
import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from agentrl.core.errors import ChatTemplateError, DataError, EnvResultError
from agentrl.core.images import PlacedImage
from agentrl.core.types import Message, Prompt, as_messages
from agentrl.rollout.images import ImageReader
from agentrl.rollout.text_codec import TextCodec, shared_length
from agentrl.tune.forms import Answer, Chat, Example, Labelled, Pair, Steps, Text
from agentrl.tune.settings import TuneConfig
from agentrl.tune.turns import Turn, TurnRenderer

IGNORED = -100
"""Label of a token that is not trained."""

Row: TypeAlias = dict[str, Any]
"""Columns of one training row, of which `agentrl.tune.trainer.Collator` makes batches."""


@dataclass(slots=True)
class Counts:
    """Numbers of examples, rows and tokens, and what became of those that are too long."""

    examples: int = 0  # that were encoded
    rows: int = 0  # that are trained or evaluated on
    branches: int = 0  # rows beyond the first of a chat, whose template writes earlier turns in another way once a later one follows
    dropped: int = 0  # rows above the maximal length
    cut: int = 0  # rows that lost their end
    split: int = 0  # texts that became several rows
    tokens: int = 0  # of all rows
    trained: int = 0  # tokens with a label
    longest: int = 0  # tokens of the longest row


class Encoder:
    """Encodes the examples of a run and counts what is cut.

    Args:
        codec: The model's tokenizer.
        config: Settings of the run.
        reader: Of images; `None` for a model that reads text only.
    """

    def __init__(self, codec: TextCodec, config: TuneConfig, reader: ImageReader | None = None) -> None:
        self._codec, self._data, self._reader = codec, config.data, reader
        self._max, self._overlong = config.data.max_length, config.data.overlong
        self._train_on = getattr(config.method, "train_on", "answers")
        self._separator = codec.encode_plain(getattr(config.method, "step_separator", "\n"))
        self._last_step_only = getattr(config.method, "last_step_only", False)
        end = codec.tokenizer.eos_token_id
        self._text_end = [] if end is None else [end]
        self._renderer = TurnRenderer(codec, config.model, system_prompt=config.data.system_prompt, end_token=config.data.eos_token)
        self.counts = Counts()
        self.ends: Counter[int] = Counter()  # tokens that end answers and texts

    def encode(self, examples: Iterable[Example], flag: str = "--data") -> list[Row]:
        """Return the rows of `examples`, in their order.

        Raises:
            DataError: If the chat template refuses one, which is named by its line, or no row is left.
        """
        rows: list[Row] = []
        for example in examples:
            self.counts.examples += 1
            try:
                rows += self._example(example)
            except ImageError as error:
                raise DataError(flag, example.source or self._data.data, f"{example.where}: {error}", "") from error
            except ChatTemplateError as error:
                problem, _, remedy = str(error).rpartition(". ")
                raise DataError(flag, example.source or self._data.data, f"{example.where}: {problem}", f"{remedy}.") from error
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
        if isinstance(example, Chat):
            branches = self._chat(example)
            self._check_places([ids for ids, _ in branches], example.images)
            self.counts.branches += max(len(branches) - 1, 0)
            return [row for ids, labels in branches for row in self._fitted_row(ids, labels, example.images)]
        ids, labels = self._steps(example) if isinstance(example, Steps) else self._single(example)
        if isinstance(example, Answer) and example.images:
            self._check_places([ids], example.images)
            return self._fitted_row(ids, labels, example.images)
        if isinstance(example, Text) and len(ids) > self._max and self._overlong == "split":
            self.counts.split += 1
            parts = [ids[at : at + self._max] for at in range(0, len(ids), self._max)]
            return [self._row(part, list(part)) for part in parts if len(part) > 1]
        return self._fitted_row(ids, labels)

    def _fitted_row(self, ids: list[int], labels: list[Any], images: Sequence[str] = ()) -> list[Row]:
        if images or self._places(ids):
            return self._row_with_images(ids, labels, images)
        kept = self._fit(len(ids), self._max)
        if all(label == IGNORED for label in labels[1:kept]):  # nothing predicts the first token
            return self._drop()
        self.counts.cut += kept < len(ids)
        return [self._row(ids[:kept], labels[:kept])]

    def _row_with_images(self, ids: list[int], labels: list[Any], images: Sequence[str]) -> list[Row]:
        """Return a row in which tokens of images, which are not trained, stand in the places of these; none if it is too long."""
        used = images[: len(self._places(ids))] if self._reader is not None else images  # a branch may end before the last image
        expanded, placed = self._expanded(ids, used)
        targets: list[Any] = []
        begin = 0
        for place, image in zip(self._places(ids), placed, strict=True):
            targets += [*labels[begin:place], *[IGNORED] * (image.end - image.place)]
            begin = place + 1
        targets += labels[begin:]
        if len(expanded) > self._max or all(label == IGNORED for label in targets[1:]):
            return self._drop()
        return [{**self._row(expanded, targets), "images": list(used)}]

    def _check_places(self, rows: Sequence[Sequence[int]], images: Sequence[str]) -> None:
        """Raise `ImageError` if no row has the places of all images, because the chat template leaves some out."""
        most = max((len(self._places(ids)) for ids in rows), default=len(images))
        if self._reader is not None and most < len(images):
            raise ImageError(f"the chat template writes {most} placeholders of images, and there are {len(images)} images")

    def _places(self, ids: Sequence[int]) -> list[int]:
        """Return where images stand in compact tokens."""
        return [] if self._reader is None else [at for at, token in enumerate(ids) if token == self._reader.placeholder]

    def _expanded(self, ids: list[int], images: Sequence[str]) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Return tokens with those of images in their places, and where these are.

        Raises:
            ImageError: If the images are more or fewer than their places, or one cannot be read.
        """
        if self._reader is None:
            if images:
                raise ImageError(f"the row has {len(images)} images and the model reads text only")
            return ids, ()
        try:
            return self._reader.expand(ids, self._reader.read_here(images))
        except EnvResultError as error:
            raise ImageError(str(error)) from error

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
        self.ends.update(self._text_end)
        return self._codec.beginning + self._codec.encode_text(text) + self._text_end

    def _single(self, example: Answer | Text) -> tuple[list[int], list[int]]:
        if isinstance(example, Text):
            ids = self._text(example.text)
            return ids, list(ids)
        prompt, (answer,) = self._prompt_and_answers(example.prompt, [example.answer])
        ids = prompt + answer
        return ids, list(ids) if self._train_on == "all" else [IGNORED] * len(prompt) + answer

    def _chat(self, example: Chat) -> list[tuple[list[int], list[int]]]:
        """Return tokens and labels of the rows of a chat."""
        everything = self._train_on == "all"
        places = [place for place, message in enumerate(example.messages) if message["role"] == "assistant"]
        if self._train_on == "last":
            places = places[-1:]
        if not everything:
            places = [place for place in places if example.messages[place].get("weight", 1) != 0]
        table = [""]
        rows = _rows_of(self._codec, self._renderer, self._renderer.turns(example.messages, places, table), table)
        for row in rows:
            self._count_ends(row)
        return [(row.ids, row.labels(rows[number - 1] if number else None, everything)) for number, row in enumerate(rows)]

    def _count_ends(self, row: _RowOfTurns) -> None:
        """Count the tokens that end answers."""
        self.ends.update(token for token in row.ends() if self._codec.is_control(token))

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
        prompt, answers = self._fitted(example, example.chosen, example.rejected)
        if not answers:
            return self._drop()
        margin = {} if example.margin is None else {"margin": example.margin}
        return [{"prompt_ids": prompt, "chosen_ids": answers[0], "rejected_ids": answers[1], **margin, **_images_of(example)}]

    def _labelled(self, example: Labelled) -> list[Row]:
        prompt, answers = self._fitted(example, example.answer)
        if not answers:
            return self._drop()
        return [{"prompt_ids": prompt, "completion_ids": answers[0], "label": example.label, **_images_of(example)}]

    def _fitted(self, example: Pair | Labelled, *messages: Message) -> tuple[list[int], list[list[int]]]:
        """Return a prompt and the answers to it, counted and cut if need be; no answers if one of them does not fit."""
        compact, answers = self._prompt_and_answers(example.prompt, messages)
        ids, _ = self._expanded(compact, example.images)
        room = self._max - len(ids)
        kept = [self._fit(len(answer), room) for answer in answers]
        if not all(kept):
            return ids, []
        self.counts.cut += any(count < len(answer) for count, answer in zip(kept, answers, strict=True))
        for count in kept:
            self._count(len(ids) + count, count)
        return ids, [answer[:count] for answer, count in zip(answers, kept, strict=True)]

    def _is_plain(self, prompt: Prompt) -> bool:
        return isinstance(prompt, str) and not self._data.apply_chat_template

    def _prompt(self, prompt: Prompt) -> list[int]:
        if self._is_plain(prompt):
            return self._codec.encode_text(str(prompt))
        table = [""]
        return self._codec.encode_marked(self._renderer.prompt(as_messages(prompt), table), table)

    def _prompt_and_answers(self, prompt: Prompt, answers: Sequence[Message]) -> tuple[list[int], list[list[int]]]:
        """Return the tokens of a prompt, and of several answers to it."""
        if self._is_plain(prompt):
            self.ends.update(self._text_end)
            return self._codec.encode_text(str(prompt)), [self._codec.encode_text(each["content"]) + self._text_end for each in answers]
        asked = as_messages(prompt)
        rows = []
        for answer in answers:
            table = [""]
            rows += _rows_of(self._codec, self._renderer, self._renderer.turns([*asked, answer], [len(asked)], table), table)
            self._count_ends(rows[-1])
        first = rows[0].prompt
        if any(row.prompt != first for row in rows):
            raise ChatTemplateError("the prompts of two answers differ in the chat template. Write both answers in one form")
        return first, [row.ids[len(first) :] for row in rows]


class _RowOfTurns:
    """A row that grows by text of prompts and answers.

    Text is encoded together with what stands before it, back to the last control token: a tokenizer may write a word in another way at
    the beginning of a text. Where that changes tokens which are there already, as two line breaks may, it is encoded alone.
    """

    def __init__(self, codec: TextCodec, renderer: TurnRenderer, table: Sequence[str]) -> None:
        self._codec, self._control, self._table = codec, renderer.control, table
        self.text, self._last = "", 0  # where the last control token begins
        self.ids: list[int] = []
        self.trained: list[bool] = []

    def add(self, text: str, *, trained: bool) -> None:
        """Put text at the end of the row."""
        before = self.text[self._last :]
        known = self._codec.encode_marked(before, self._table)
        joint = self._codec.encode_marked(before + text, self._table)
        ids = joint[len(known) :] if joint[: len(known)] == known else self._codec.encode_marked(text, self._table)
        self._last = max((len(self.text) + found.start() for found in self._control.finditer(text)), default=self._last)
        self.text += text
        self.ids += ids
        self.trained += [trained] * len(ids)

    @property
    def prompt(self) -> list[int]:
        """The tokens before the first answer."""
        return self.ids[: self.trained.index(True)]

    def ends(self) -> list[int]:
        """Return the last token of each answer."""
        following = [*self.trained[1:], False]
        return [token for token, trained, next_one in zip(self.ids, self.trained, following, strict=True) if trained and not next_one]

    def labels(self, before: _RowOfTurns | None, everything: bool) -> list[int]:
        """Return the label of each token; where everything is trained, tokens that begin the row before are trained there."""
        if not everything:
            return [token if trained else IGNORED for token, trained in zip(self.ids, self.trained, strict=True)]
        shared = shared_length(self.ids, before.ids) if before else 0
        return [IGNORED] * shared + self.ids[shared:]


def _rows_of(codec: TextCodec, renderer: TurnRenderer, turns: Iterable[Turn], table: Sequence[str]) -> list[_RowOfTurns]:
    """Return the rows of turns: one whose prompt goes on with the row before joins it, another one begins a row of its own."""
    rows: list[_RowOfTurns] = []
    for turn in turns:
        if not rows or not turn.prompt.startswith(rows[-1].text):
            rows.append(_RowOfTurns(codec, renderer, table))
        rows[-1].add(turn.prompt[len(rows[-1].text) :], trained=False)
        rows[-1].add(turn.answer, trained=True)
    return rows


def _images_of(example: Pair | Labelled) -> Row:
    """Return the column of the images of a prompt; none for a prompt of text."""
    return {"images": list(example.images)} if example.images else {}


def render(codec: TextCodec, row: Row) -> str:
    """Return a whole row as text for a person, with what is trained between ``[[`` and ``]]``."""
    if "chosen_ids" in row:
        prompt = codec.decode(row["prompt_ids"])
        margin = f"\nmargin   {row['margin']:g}" if "margin" in row else ""
        answers = [f"{name:<8} [[{codec.decode(row[f'{name}_ids'])}]]" for name in ("chosen", "rejected")]
        return "\n".join((f"prompt   {prompt}", *answers)) + margin
    if "completion_ids" in row:
        text = f"{codec.decode(row['prompt_ids'])}[[{codec.decode(row['completion_ids'])}]]"
        return f"{'desirable' if row['label'] else 'undesirable'}  {text}"
    return _marked(codec, row["input_ids"], row["labels"])


def _marked(codec: TextCodec, ids: Sequence[int], labels: Sequence[Any]) -> str:
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


class ImageError(ValueError):
    """Images of a row that cannot be used."""


def fingerprint(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a hash of the contents of rows, by which a resumed run knows its data."""
    digest = hashlib.sha256()
    for row in rows:
        for name in sorted(row):
            value = row[name]
            numbers = value if isinstance(value, list) else [value]
            digest.update(name.encode())
            digest.update("".join(numbers).encode() if name == "images" else array("d", map(float, numbers)).tobytes())
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
