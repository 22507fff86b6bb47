"""The data of a run: rows of its sources as checked examples, the held-out ones, and the order in which the others are drawn."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.config.tune import TuneDataConfig, TuneEvalConfig
from agentrl.core.errors import ConfigError, DataError
from agentrl.core.settings import listed
from agentrl.core.types import derive_seed
from agentrl.env.data_files import read_rows
from agentrl.env.prompts import PromptFormat
from agentrl.env.tasks import TaskOrder, shares
from agentrl.rollout.forms import REASONING
from agentrl.track.text import count, counted
from agentrl.tune.columns import Columns, RowError, refuse_media
from agentrl.tune.forms import PARSERS, Answer, Chat, Example, Labelled, Pair, Steps, Text
from agentrl.tune.named import Item, NamedForm, named_form, recast, unfolded


@dataclass(frozen=True, slots=True)
class Examples:
    """The examples of a run.

    Attributes:
        parts: Examples to train on, by source.
        weights: Proportion of each part; empty: one collection.
        held_out: Examples to evaluate on.
        notes: What a person is told of the sources: forms, skipped rows, copies, labels that are all the same.
    """

    parts: tuple[tuple[Example, ...], ...]
    weights: tuple[float, ...]
    held_out: tuple[Example, ...]
    notes: tuple[str, ...] = ()


MIN_HELD_OUT = 20
"""Rows that are held out at least, where nothing is said and there are enough."""
SKIP = "Mend the row, or skip such rows with --bad-rows skip."
KEYS = {"role", "content", "weight", "name", "tools", "tool_calls", "tool_call_id", *REASONING}
"""Keys of a message with a meaning of their own."""
SHOWN = 3
"""Skipped rows that are shown."""
NAMES = {
    Chat: "chat",
    Answer: "prompt and completion",
    Text: "text",
    Pair: "chosen and rejected",
    Labelled: "labelled answers",
    Steps: "steps",
}


def read_examples(data: TuneDataConfig, form: str, seed: int, evaluation: TuneEvalConfig) -> Examples:
    """Read and check all rows that a run trains and evaluates on.

    Args:
        data: Sources of the rows, and what is taken of them.
        form: Form of the rows, a key of `agentrl.tune.forms.PARSERS`.
        seed: Seed of the choice of held-out rows.
        evaluation: Evaluations, which need such rows.

    Raises:
        DataError: If a row is malformed; the message names the file, the line and the column.
        ConfigError: If nothing is left to train on.
    """
    notes: list[str] = []
    reading = PromptFormat(flag="--data", split=data.data_split, split_flag="--data-split")
    parts = [_read(source, reading, data, form, notes) for source in listed(data.data)]
    weights = tuple(map(float, listed(data.data_probs)))
    if data.eval_data:
        reading = PromptFormat(flag="--eval-data", split=data.eval_split, split_flag="--eval-split")
        found = [example for source in listed(data.eval_data) for example in _read(source, reading, data, form, notes)]
        count = data.eval_size or len(found)
        return Examples(tuple(map(tuple, parts)), weights, tuple(_sample(found, count, seed)[0]), tuple(notes))
    if not weights:
        parts = [list(itertools.chain.from_iterable(parts))]
    count = held_out_of(sum(map(len, parts))) if data.eval_size is None else data.eval_size
    if (evaluation.eval_every or evaluation.keep_best) and not count:
        name, value = ("--eval-every", evaluation.eval_every) if evaluation.eval_every else ("--keep-best", evaluation.keep_best)
        problem = f"has no rows to evaluate on: of {counted(sum(map(len, parts)), 'row')} none is held out unless you say so"
        raise ConfigError(name, value, problem, "Add --eval-size N or --eval-data.")
    held, kept = _hold_out(parts, weights or (1.0,), count, seed)
    return Examples(tuple(map(tuple, kept)), weights, tuple(held), tuple(notes))


def _read(source: str, reading: PromptFormat, data: TuneDataConfig, kind: str, notes: list[str]) -> list[Example]:
    """Return the examples of one source; `notes` gets what a person is told of them.

    Raises:
        DataError: If it has no row, one is malformed, or more of them are than may be skipped.
    """
    bad: list[str] = []
    reading = replace(reading, bad=bad if data.bad_rows == "skip" else None)
    items: Iterator[Item] = ((where, unfolded(row, kind)) for where, row in read_rows(source, reading))
    first = next(items, None)
    form = named_form(first[1], data, kind) if first else None
    items = itertools.chain([first] if first else [], items)
    found, unread, count = list[Example](), dict[str, None](), 0
    for count, (where, row) in enumerate(form.join(items) if form and form.join else items, start=1):  # noqa: B007
        try:
            found += _examples(row, form, data, kind, source, where)
            unread.update(dict.fromkeys(row.unread()))
        except RowError as error:
            problem = f"{where}: {error}" + (f", made of the form {form.name}" if form and error.key not in row else "")
            if data.bad_rows == "stop":
                raise DataError(reading.flag, source, problem, error.remedy or SKIP) from error
            bad.append(problem)
    if len(bad) > data.max_bad_rows * (count + len(bad)):
        problem = f"has {len(bad)} rows that cannot be used, more than --max-bad-rows allows. {bad[0]}"
        raise DataError(reading.flag, source, problem, "Mend them, or raise --max-bad-rows.")
    if not found:
        raise DataError(reading.flag, source, "holds no row", "Give at least one.")
    notes += _notes(source, count, form, found, bad, list(unread))
    return found


def _examples(row: Columns, form: NamedForm | None, data: TuneDataConfig, kind: str, source: str, where: str) -> list[Example]:
    """Return the examples of a row, which notes the columns that were read."""
    parse: Callable[[Any, Any], list[Example]] = PARSERS[kind]  # type: ignore[assignment]
    refuse_media(row)
    rows = [row] if form is None else recast(form, row)
    found = [replace(example, source=source, where=where) for each in rows for example in parse(each, data)]
    plain = dict(row)
    for each in rows:  # a column that was carried over counts as read where its copy was
        row.read.update(name for name, value in dict(each).items() if name in each.read and plain.get(name) is value)
    return found


def _notes(
    source: str, count: int, form: NamedForm | None, found: Sequence[Example], bad: Sequence[str], unread: Sequence[str]
) -> list[str]:
    """Return what a person is told of a source: the form of its rows, those that are skipped, and what is odd about the others."""
    name = f"the form {form.name} ({form.about or form.columns})" if form else f"the form {NAMES[type(found[0])]}"
    notes = [f"{source}: {counted(count, 'row')} of {name}, {counted(len(found), 'example')}"]
    if unread:
        notes.append(f"{source}: columns that are not read: {', '.join(unread)}")
    if keys := _unknown_keys(found):
        notes.append(f"{source}: keys of messages that only a chat template may read: {', '.join(keys)}")
    if bad:
        notes += [f"{source}: {counted(len(bad), 'row')} skipped:", *(f"  {line}" for line in bad[:SHOWN])]
    # Examples hold dictionaries, which cannot be hashed, so their texts are compared.
    if copies := len(found) - len({repr(example) for example in found}):
        notes.append(f"{source}: {counted(copies, 'example')} that stood there before")
    labels = {example.label for example in found if isinstance(example, Labelled)}
    if len(labels) == 1:
        word = "desirable" if True in labels else "undesirable"
        notes.append(f"{source}: all answers are {word}: there is nothing to tell them from")
    return notes


def _unknown_keys(found: Sequence[Example]) -> list[str]:
    """Return the keys of messages that have no meaning here, in the order in which they come."""
    keys: dict[str, None] = {}
    for example in found:
        parts = [getattr(example, name, ()) for name in ("messages", "prompt", "answer", "chosen", "rejected")]
        for messages in ([part] if isinstance(part, dict) else part for part in parts if not isinstance(part, str)):
            keys.update(dict.fromkeys(key for message in messages for key in message if key not in KEYS))
    return list(keys)


def held_out_of(size: int) -> int:
    """Return how many of `size` rows are held out where nothing is said: one of a hundred, at least 20, none of fewer than 200."""
    return 0 if size < 10 * MIN_HELD_OUT else max(size // 100, MIN_HELD_OUT)


def _hold_out(parts: Sequence[list[Example]], weights: Sequence[float], total: int, seed: int) -> tuple[list[Example], list[list[Example]]]:
    """Hold out `total` examples, of each part by its weight; return them, and the parts without them."""
    held, kept = list[Example](), list[list[Example]]()
    for index, (part, share) in enumerate(zip(parts, shares(total, weights), strict=True)):
        if share >= len(part):
            problem = f"leaves nothing to train on of {' + '.join(str(len(each)) for each in parts)} rows"
            raise ConfigError("--eval-size", total, problem, "Lower it, or name other rows with --eval-data.")
        chosen, rest = _sample(part, share, seed, index)
        held += chosen
        kept.append(rest)
    return held, kept


def _sample(examples: list[Example], count: int, seed: int, part: int = 0) -> tuple[list[Example], list[Example]]:
    """Return `count` examples that the seed chooses, in their own order, and the others."""
    chosen = set(random.Random(derive_seed(seed, "eval", part)).sample(range(len(examples)), min(count, len(examples))))
    split: tuple[list[Example], list[Example]] = ([], [])
    for index, example in enumerate(examples):
        split[index not in chosen].append(example)
    return split


def drawing_order(sizes: Sequence[int], count: int, data: TuneDataConfig, seed: int) -> list[int]:
    """Return the indices of the first `count` rows that a run draws, epoch after epoch, from parts of these sizes that follow each other.

    The order follows from the seed alone, so a resumed run and a run on another number of ranks draw the same rows in each step.
    """
    epochs = map(_order(sizes, data, seed).epoch, itertools.count())
    return list(itertools.islice(itertools.chain.from_iterable(epochs), count))


def epoch_size(sizes: Sequence[int], data: TuneDataConfig, seed: int) -> int:
    """Return the number of rows of the first epoch: all rows, or with proportions as many as empty the first part that is drawn whole."""
    return len(_order(sizes, data, seed).epoch(0))


def _order(sizes: Sequence[int], data: TuneDataConfig, seed: int) -> TaskOrder:
    return TaskOrder(sizes, tuple(map(float, listed(data.data_probs))) or (1.0,), seed=seed, shuffle=data.shuffle)


def data_text(counts: Mapping[str, int], max_length: int) -> str:
    """Return in one sentence what became of the rows of a data set."""
    cut = [f"{counts[name]} {name}" for name in ("dropped", "cut", "split") if counts[name]]
    above = f"; above --max-length {max_length}: {', '.join(cut)}" if cut else ""
    tokens = f"{count(counts['tokens'])} tokens, {count(counts['trained'])} of them trained, the longest row {counts['longest']}"
    branches = f", {counts['branches']} of them because the chat template rewrites earlier turns," if counts.get("branches") else ""
    return f"{counted(counts['rows'], 'row')}{branches} with {tokens}{above}"
