"""Examples as token ids: the prompt that the chat template writes, then the answer as it writes it, with the token that ends it.

A trained answer begins where a sampled one does. What is trained follows from where tokens come from, not from marks in a template. A
template that writes earlier turns in another way once a later one follows gives each such answer a row of its own.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from agentrl.config.tune import MethodConfig, TuneDataConfig
from agentrl.core.errors import ChatTemplateError, DataError, EnvResultError
from agentrl.core.images import PlacedImage
from agentrl.core.operating_system import usable_cores
from agentrl.core.types import Message, Prompt, as_messages
from agentrl.rollout.images import ImageReader
from agentrl.rollout.plan import ModelConfig
from agentrl.rollout.text_codec import TextCodec
from agentrl.tune.columns import is_trained
from agentrl.tune.forms import Answer, Chat, Example, Labelled, Pair, Steps, Text
from agentrl.tune.row_table import Row
from agentrl.tune.row_text import IGNORED, RowOfTurns, TextBatch, Wanted, as_array, rows_of
from agentrl.tune.turns import TurnRenderer

Tokens: TypeAlias = "array[int] | list[int]"

Planned: TypeAlias = tuple[Example, list[RowOfTurns]]
"""An example, and its rows as text."""

CHUNK = 256
"""Examples whose texts are encoded together."""
AHEAD = 4
"""So many times these are encoded while rows are made of those before."""


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
        data: Settings of the rows.
        model: Settings of the chat template.
        method: Settings of the method, which say what is trained.
        reader: Of images; `None` for a model that reads text only.
    """

    def __init__(
        self, codec: TextCodec, data: TuneDataConfig, model: ModelConfig, method: MethodConfig, reader: ImageReader | None = None
    ) -> None:
        self.codec, self._data, self._reader = codec, data, reader
        self._max, self._overlong = data.max_length, data.overlong
        self._train_on = getattr(method, "train_on", "answers")
        self._separator = codec.encode_plain(getattr(method, "step_separator", "\n"))
        self._last_step_only = getattr(method, "last_step_only", False)
        end = codec.tokenizer.eos_token_id
        self._text_end = as_array() if end is None else as_array([end])
        self._renderer = TurnRenderer(codec, model, system_prompt=data.system_prompt, end_token=data.eos_token)
        self._batch = TextBatch(codec)
        self.counts = Counts()
        self.ends: Counter[int] = Counter()  # tokens that end answers and texts

    def encode(self, examples: Iterable[Example], flag: str = "--data") -> list[Row]:
        """Return the rows of `examples`, in their order.

        Raises:
            DataError: If the chat template refuses one, which is named by its line, or no row is left.
        """
        rows: list[Row] = []
        for example, planned in self._planned(examples, flag):
            self.counts.examples += 1
            try:
                rows += self._example(example, planned)
            except (ImageError, ChatTemplateError) as error:
                raise self._named(example, flag, error) from error
        if not rows:
            problem = f"leaves no row: all {self.counts.examples} have more than --max-length {self._max} tokens"
            raise DataError(flag, self._data.data, problem, "Raise --max-length, or use --overlong cut.")
        self.counts.rows += len(rows)
        return rows

    def _named(self, example: Example, flag: str, error: ImageError | ChatTemplateError) -> DataError:
        """Return the error of an example that cannot be used, with its line."""
        where = example.source or self._data.data
        if isinstance(error, ImageError):
            return DataError(flag, where, f"{example.where}: {error}", "")
        problem, _, remedy = str(error).rpartition(". ")
        return DataError(flag, where, f"{example.where}: {problem}", f"{remedy}.")

    def _planned(self, examples: Iterable[Example], flag: str) -> Iterator[Planned]:
        """Yield examples with their rows as text, whose tokens are there by then; those of the next ones become tokens meanwhile."""
        left, takes_turns = iter(examples), usable_cores() == 1
        encoding: deque[tuple[list[Planned], Wanted, Future[list[array[int]]]]] = deque()
        with ThreadPoolExecutor(2) as pool:  # one encodes while the other takes the tokens over from the tokenizer
            while chunk := list(itertools.islice(left, CHUNK)):
                planned = [(example, self._plan_of(example, flag)) for example in chunk]
                wanted = self._batch.taken()
                encoding.append((planned, wanted, pool.submit(self.codec.encode_pieces, wanted.pieces)))
                if takes_turns:
                    encoding[-1][-1].exception()  # two threads on one core would only be in each other's way
                if len(encoding) > AHEAD:
                    yield from self._encoded(*encoding.popleft())
            while encoding:
                yield from self._encoded(*encoding.popleft())

    def _plan_of(self, example: Example, flag: str) -> list[RowOfTurns]:
        try:
            return self._plan(example)
        except (ImageError, ChatTemplateError) as error:
            raise self._named(example, flag, error) from error

    def _encoded(self, planned: list[Planned], wanted: Wanted, tokens: Future[list[array[int]]]) -> Iterator[Planned]:
        self._batch.put(wanted, tokens.result())
        yield from planned

    def _plan(self, example: Example) -> list[RowOfTurns]:
        """Return the rows that the chat template writes for an example, as text; none where it is not asked."""
        if isinstance(example, Text):
            self._batch.want(example.text)
        if isinstance(example, Text | Steps):
            return []
        if example.images and self._reader is None:  # said here, because the template of a text model fails on parts for images
            raise ImageError(f"the row has {len(example.images)} images, and the model reads no images")
        if isinstance(example, Chat):
            return self._rows_of(example.messages, self._places_of_answers(example))
        answers = [example.chosen, example.rejected] if isinstance(example, Pair) else [example.answer]
        if self._is_plain(example.prompt):
            for text in (str(example.prompt), *(answer["content"] for answer in answers)):
                self._batch.want(text)
            return []
        asked = as_messages(example.prompt)
        return [row for answer in answers for row in self._rows_of([*asked, answer], [len(asked)])]

    def _rows_of(self, messages: Sequence[Message], places: Sequence[int]) -> list[RowOfTurns]:
        table = [""]
        turns = self._renderer.turns(messages, places, table)
        return rows_of(self.codec, self._renderer, self._batch, turns, table)

    def _example(self, example: Example, planned: list[RowOfTurns]) -> list[Row]:
        """Return the rows of one example; none if it is too long."""
        for row in planned:
            row.finish()
            self.ends.update(token for token in row.ends if self.codec.is_control(token))
        if isinstance(example, Pair | Labelled):
            return self._judged(example, planned)
        if isinstance(example, Text):
            return self._text(example.text)
        branches = self._branches(example, planned)
        self.counts.branches += max(len(branches) - 1, 0)
        images = () if isinstance(example, Steps) else example.images
        self._check_places([ids for ids, _ in branches], images)
        return [row for ids, labels in branches for row in self._fitted_row(ids, labels, images)]

    def _branches(self, example: Chat | Answer | Steps, planned: list[RowOfTurns]) -> list[tuple[Tokens, Tokens | list[float]]]:
        """Return the tokens and the labels of each row of an example, before images take their places."""
        if isinstance(example, Steps):
            return [self._steps(example)]
        everything = self._train_on == "all"
        if isinstance(example, Chat):
            pairs = zip([None, *planned], planned, strict=False)
            return [(row.ids, row.labels(before, everything)) for before, row in pairs]
        prompt, (answer,) = self._prompt_and_answers(example.prompt, [example.answer], planned)
        ids = prompt + answer
        return [(ids, ids if everything else as_array([IGNORED]) * len(prompt) + answer)]

    def _text(self, text: str) -> list[Row]:
        """Return the row of a text, or several of one that is too long."""
        self.ends.update(self._text_end)
        ids = as_array(self.codec.beginning) + self._batch.ids(text) + self._text_end
        if len(ids) <= self._max or self._overlong != "split":
            return self._fitted_row(ids, ids)
        self.counts.split += 1
        parts = [ids[at : at + self._max] for at in range(0, len(ids), self._max)]
        return [self._row(part, part, len(part)) for part in parts if len(part) > 1]

    def _fitted_row(self, ids: Tokens, labels: Tokens | list[float], images: Sequence[str] = ()) -> list[Row]:
        if images or self._places(ids):
            return self._row_with_images(ids, labels, images)
        kept = self._fit(len(ids), self._max)
        ids, labels, cut = ids[:kept], labels[:kept], kept < len(ids)
        trained = int(np.count_nonzero(np.asarray(labels) != IGNORED))
        if trained == (kept > 0 and labels[0] != IGNORED):  # nothing predicts the first token
            return self._drop()
        self.counts.cut += cut
        return [self._row(ids, labels, trained)]

    def _row_with_images(self, ids: Tokens, labels: Tokens | list[float], images: Sequence[str]) -> list[Row]:
        """Return a row in which tokens of images, which are not trained, stand in the places of these; none if it is too long."""
        used = images[: len(self._places(ids))] if self._reader is not None else images  # a branch may end before the last image
        expanded, placed = self._expanded(ids, used)
        targets: list[Any] = list(labels)
        for place, image in reversed([*zip(self._places(ids), placed, strict=True)]):
            targets[place : place + 1] = [IGNORED] * (image.end - image.place)
        if len(expanded) > self._max or all(label == IGNORED for label in targets[1:]):
            return self._drop()
        trained = len(targets) - targets.count(IGNORED)
        return [{**self._row(expanded, targets, trained), "images": list(used)}]

    def _check_places(self, rows: Sequence[Sequence[int]], images: Sequence[str]) -> None:
        """Raise `ImageError` if no row has the places of all images, because the chat template leaves some out."""
        most = max((len(self._places(ids)) for ids in rows), default=len(images))
        if self._reader is not None and most < len(images):
            raise ImageError(f"the chat template writes {most} placeholders of images, and there are {len(images)} images")

    def _places(self, ids: Sequence[int]) -> list[int]:
        """Return where images stand in compact tokens."""
        return [] if self._reader is None else [at for at, token in enumerate(ids) if token == self._reader.placeholder]

    def _expanded(self, ids: Tokens, images: Sequence[str]) -> tuple[Tokens, tuple[PlacedImage, ...]]:
        """Return tokens with those of images in their places, and where these are.

        Raises:
            ImageError: If the images are more or fewer than their places, or one cannot be read.
        """
        if self._reader is None:
            return ids, ()
        try:
            expanded, placed = self._reader.expand(list(ids), self._reader.read_here(images))
        except EnvResultError as error:
            raise ImageError(str(error)) from error
        return as_array(expanded), placed

    def _drop(self) -> list[Row]:
        self.counts.dropped += 1
        return []

    def _fit(self, length: int, room: int) -> int:
        """Return how many of `length` tokens are kept where there is room for `room`; 0 drops the row."""
        if length <= room:
            return length
        return max(room, 0) if self._overlong == "cut" else 0

    def _row(self, ids: Tokens, labels: Sequence[float], trained: int) -> Row:
        self._count(len(ids), trained)
        return {"input_ids": ids, "labels": labels}

    def _count(self, tokens: int, trained: int) -> None:
        self.counts.tokens += tokens
        self.counts.trained += trained
        self.counts.longest = max(self.counts.longest, tokens)

    def _places_of_answers(self, example: Chat) -> list[int]:
        """Return the places of the answers that are trained, or with ``--train-on all`` of all."""
        if self._train_on == "all":
            return [place for place, message in enumerate(example.messages) if message["role"] == "assistant"]
        places = [place for place, message in enumerate(example.messages) if is_trained(message)]
        return places[-1:] if self._train_on == "last" else places

    def _steps(self, example: Steps) -> tuple[list[int], list[float]]:
        ids = self._prompt(example.prompt)
        labels: list[float] = [IGNORED] * len(ids)
        for number, (text, label) in enumerate(zip(example.steps, example.labels, strict=True), start=1):
            step = self.codec.encode_plain(text) + self._separator
            counts = not self._last_step_only or number == len(example.steps)
            ids += step
            labels += [IGNORED] * (len(step) - 1) + [label if counts else IGNORED]
        return ids, labels

    def _judged(self, example: Pair | Labelled, planned: list[RowOfTurns]) -> list[Row]:
        """Return the row of a pair or of a labelled answer; none if an answer does not fit."""
        rest: dict[str, Any]
        if isinstance(example, Pair):
            answers = {"chosen_ids": example.chosen, "rejected_ids": example.rejected}
            rest = {} if example.margin is None else {"margin": example.margin}
        else:
            answers, rest = {"completion_ids": example.answer}, {"label": example.label}
        compact, encoded = self._prompt_and_answers(example.prompt, list(answers.values()), planned)
        ids, _ = self._expanded(compact, example.images)
        kept = [self._fit(len(answer), self._max - len(ids)) for answer in encoded]
        if not all(kept):
            return self._drop()
        self.counts.cut += any(count < len(answer) for count, answer in zip(kept, encoded, strict=True))
        for count in kept:
            self._count(len(ids) + count, count)
        cut = {name: answer[:count] for name, answer, count in zip(answers, encoded, kept, strict=True)}
        return [{"prompt_ids": ids, **cut, **rest, **({"images": list(example.images)} if example.images else {})}]

    def _is_plain(self, prompt: Prompt) -> bool:
        return isinstance(prompt, str) and not self._data.apply_chat_template

    def _prompt(self, prompt: Prompt) -> list[int]:
        if self._is_plain(prompt):
            return self.codec.encode_text(str(prompt))
        table = [""]
        return self.codec.encode_marked(self._renderer.prompt(as_messages(prompt), table), table)

    def _prompt_and_answers(
        self, prompt: Prompt, answers: Sequence[Message], planned: list[RowOfTurns]
    ) -> tuple[array[int], list[array[int]]]:
        """Return the tokens of a prompt, and of several answers to it."""
        if not planned:
            self.ends.update(self._text_end)
            return self._batch.ids(str(prompt)), [self._batch.ids(each["content"]) + self._text_end for each in answers]
        first = planned[0].prompt
        if any(row.prompt != first for row in planned):
            raise ChatTemplateError("the prompts of two answers differ in the chat template. Write both answers in one form")
        return first, [row.ids[len(first) :] for row in planned]


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
    pieces = []
    for is_ignored, run in itertools.groupby(zip(ids, labels, strict=True), lambda pair: pair[1] == IGNORED):
        part = codec.decode([token for token, _ in run])
        pieces.append(part if is_ignored else f"[[{part}]]")
    return "".join(pieces)


class ImageError(ValueError):
    """Images of a row that cannot be used."""
