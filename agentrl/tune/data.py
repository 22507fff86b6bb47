"""The data of a run: rows of its sources as checked examples, the held-out ones, and the order in which the others are drawn."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.config.data_rules import listed
from agentrl.core.errors import ConfigError, DataError
from agentrl.core.types import derive_seed
from agentrl.env.prompts import PromptFormat, read_rows
from agentrl.env.tasks import TaskOrder, shares
from agentrl.tune.forms import PARSERS, Example, RowError
from agentrl.tune.settings import TuneConfig, TuneDataConfig


@dataclass(frozen=True, slots=True)
class Examples:
    """The examples of a run.

    Attributes:
        parts: Examples to train on, by source.
        weights: Proportion of each part; empty: one collection.
        held_out: Examples to evaluate on.
    """

    parts: tuple[tuple[Example, ...], ...]
    weights: tuple[float, ...]
    held_out: tuple[Example, ...]

    @property
    def num_trained(self) -> int:
        """Number of examples to train on."""
        return sum(map(len, self.parts))


def read_examples(config: TuneConfig, form: str) -> Examples:
    """Read and check all rows that a run trains and evaluates on.

    Args:
        config: Settings of the run.
        form: Form of the rows, a key of `agentrl.tune.forms.PARSERS`.

    Raises:
        DataError: If a row is malformed; the message names the file, the line and the column.
        ConfigError: If nothing is left to train on.
    """
    data = config.data
    parts = [
        _read(source, PromptFormat(flag="--data", split=data.data_split, split_flag="--data-split"), data, form)
        for source in listed(data.data)
    ]
    weights = tuple(map(float, listed(data.data_probs)))
    if data.eval_data:
        reading = PromptFormat(flag="--eval-data", split=data.eval_split, split_flag="--eval-split")
        found = [example for source in listed(data.eval_data) for example in _read(source, reading, data, form)]
        count = data.eval_size or len(found)
        return Examples(tuple(map(tuple, parts)), weights, tuple(_sample(found, count, config.run.seed)[0]))
    if not weights:
        parts = [list(itertools.chain.from_iterable(parts))]
    held, kept = _hold_out(parts, weights or (1.0,), config)
    return Examples(tuple(map(tuple, kept)), weights, tuple(held))


def _read(source: str, reading: PromptFormat, data: TuneDataConfig, form: str) -> list[Example]:
    parse: Callable[[Any, Any], list[Example]] = PARSERS[form]  # type: ignore[assignment]
    found: list[Example] = []
    for where, row in read_rows(source, reading):
        try:
            found += [replace(example, source=source, where=where) for example in parse(row, data)]
        except RowError as error:
            raise DataError(reading.flag, source, f"{where}: {error}", error.remedy) from error
    if not found:
        raise DataError(reading.flag, source, "holds no row", "Give at least one.")
    return found


def _hold_out(parts: Sequence[list[Example]], weights: Sequence[float], config: TuneConfig) -> tuple[list[Example], list[list[Example]]]:
    """Hold out examples of each part by its weight; return them, and the parts without them."""
    held: list[Example] = []
    kept: list[list[Example]] = []
    for index, (part, count) in enumerate(zip(parts, shares(config.data.eval_size, weights), strict=True)):
        if count >= len(part):
            problem = f"leaves nothing to train on of {' + '.join(str(len(each)) for each in parts)} rows"
            raise ConfigError("--eval-size", config.data.eval_size, problem, "Lower it, or name other rows with --eval-data.")
        chosen, rest = _sample(part, count, config.run.seed, index)
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


def drawing_order(sizes: Sequence[int], count: int, config: TuneConfig) -> list[int]:
    """Return the indices of the first `count` rows that a run draws, epoch after epoch, from parts of these sizes that follow each other.

    The order follows from the seed alone, so a resumed run and a run on another number of ranks draw the same rows in each step.
    """
    weights = tuple(map(float, listed(config.data.data_probs))) or (1.0,)
    order = TaskOrder(sizes, weights, seed=config.run.seed, shuffle=config.data.shuffle)
    drawn: list[int] = []
    for epoch in itertools.count():
        if len(drawn) >= count:
            return drawn[:count]
        drawn += order.epoch(epoch)
    raise AssertionError


def epoch_size(sizes: Sequence[int], config: TuneConfig) -> int:
    """Return the number of rows of the first epoch: all rows, or with proportions as many as empty the first part that is drawn whole."""
    weights = tuple(map(float, listed(config.data.data_probs))) or (1.0,)
    return len(TaskOrder(sizes, weights, seed=config.run.seed, shuffle=config.data.shuffle).epoch(0))
