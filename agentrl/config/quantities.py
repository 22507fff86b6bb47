"""Numbers that other systems count otherwise: answers of an update, rows and passes, where a run here has groups, updates and steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

Given = Mapping[str, Sequence[str]]
"""Words of a command line, each with its values."""

IN_STEP = "always it is in --groups-per-step and --mini-batches"
BOUNDED = "always --num-steps bounds the run; data are repeated in a new order as often as needed"
UNBOUNDED = 1_000_000
"""Rows from which a bound on the number of rows stands for all of them."""


def product(factors: Iterable[Sequence[str]]) -> float | None:
    """Return the product of the numbers among the values of words; `None` if there is none."""
    numbers = []
    for values in factors:
        try:
            numbers.append(float(values[0]))
        except (IndexError, ValueError):
            continue
    return math.prod(numbers) if numbers else None


def in_steps(numbers: Mapping[str, float], ours: Given, rows: int | None) -> dict[str, str]:
    """Return what numbers of a reinforcement-learning run are here.

    Args:
        numbers: By name. ``prompts`` of a batch and ``samples`` of each; ``update_answers`` or ``update_prompts`` of an optimizer update,
            or ``answers`` that a rank takes at once, of ``passes`` to an update and ``per_generation`` to a batch; ``generation_answers``
            of a batch; ``updates`` of the run; ``rows`` of the data that count, ``epochs``, ``warmup_share`` of the steps; ``ranks``;
            ``engine_gpus`` of an engine, where engines share the GPUs of the ranks.
        ours: Flags of ours that are given, with their values.
        rows: Rows of the data, where they are known.
    """
    samples = numbers.get("samples") or _value(ours, "--n-samples-per-prompt", 8)
    ranks = numbers.get("ranks", 1)
    update = numbers.get("answers", 0) * ranks * numbers.get("passes", 1)
    update = update or numbers.get("update_answers", 0) or numbers.get("update_prompts", 0) * samples
    batch = numbers.get("generation_answers", 0) or numbers.get("answers", 0) * ranks * numbers.get(
        "per_generation", numbers.get("passes", 1)
    )
    groups = numbers.get("prompts") or max(1, round(batch / samples)) * bool(batch)
    in_step = groups or _value(ours, "--groups-per-step", 16)
    updates = max(1, math.ceil(in_step * samples / update)) if update else 1
    made = dict.fromkeys(numbers, IN_STEP)
    if groups:
        made[_first(numbers, "prompts", "generation_answers", "answers")] = f"--groups-per-step {groups:.0f}"
    if "samples" in numbers:
        made["samples"] = f"--n-samples-per-prompt {samples:.0f}"
    if updates > 1:
        name = _first(numbers, "update_answers", "update_prompts", "per_generation", "passes", "answers")
        made[name] = f"{made[name]} --mini-batches {updates}" if made[name].startswith("--") else f"--mini-batches {updates}"
    steps = _value(ours, "--num-steps", 0)
    if "updates" in numbers:
        steps = math.ceil(numbers["updates"] / updates)
        made["updates"] = f"--num-steps {steps}"
    if "ranks" in numbers:
        made["ranks"] = f"--num-learners {ranks:.0f}"
    if "engine_gpus" in numbers:
        engines = f" --num-engines {max(1, ranks // numbers['engine_gpus']):.0f}" if "ranks" in numbers else ""
        made["engine_gpus"] = f"--tensor-parallel-size {numbers['engine_gpus']:.0f}{engines}"
    return made | _length(numbers, rows, in_step, steps)


def _length(numbers: Mapping[str, float], rows: int | None, groups: float, steps: float) -> dict[str, str]:
    """The meaning of rows, passes and warm-up: steps of `groups` prompts."""
    most = numbers.get("rows", 0)
    counted = rows if rows is not None and not 0 < most < rows else most if 0 < most < UNBOUNDED else None
    made = {name: BOUNDED for name in ("rows", "epochs") if name in numbers}
    if made and counted and not steps:
        steps = max(1, math.ceil(counted * numbers.get("epochs", 1) / groups))
        made |= dict.fromkeys(made, "always it is in --num-steps")
        made[_first(made, "epochs", "rows")] = f"--num-steps {steps}"
    return made | _warm_up(numbers, steps or 50)


def in_rows(numbers: Mapping[str, float], ours: Given, rows: int | None) -> dict[str, str]:
    """Return what numbers of a training on given rows are here; arguments as of `in_steps`."""
    ranks, epochs = numbers.get("ranks", 1), numbers.get("epochs", _value(ours, "--num-epochs", 1))
    batch = numbers.get("answers", 0) * ranks * numbers.get("passes", 1) or numbers.get("update_answers", 0) or numbers.get("prompts", 0)
    made = dict.fromkeys(numbers, "always it is in --batch-size")
    if batch:
        made[_first(numbers, "answers", "update_answers", "prompts")] = f"--batch-size {batch:.0f}"
    if "rows" in numbers:
        fewer = rows is not None and 0 < numbers["rows"] < rows
        made["rows"] = f"none the data have {rows} rows; write those that are wanted to a file" if fewer else "always all rows are trained"
    if "epochs" in numbers:
        made["epochs"] = f"--num-epochs {epochs:g}"
    steps = numbers.get("updates") or _value(ours, "--num-steps", 0)
    if "updates" in numbers:
        made["updates"] = f"--num-steps {steps:.0f}"
    if not steps and rows:
        steps = math.ceil(math.ceil(rows / (batch or _value(ours, "--batch-size", 32))) * epochs)
    return made | _warm_up(numbers, steps) | ({"ranks": f"--num-ranks {ranks:.0f}"} if "ranks" in numbers else {})


def _warm_up(numbers: Mapping[str, float], steps: float) -> dict[str, str]:
    if "warmup_share" not in numbers:
        return {}
    share = numbers["warmup_share"]
    unknown = "none the number of steps is not known; write --lr-warmup-steps N"
    return {"warmup_share": "always off" if share <= 0 else f"--lr-warmup-steps {max(1, round(share * steps))}" if steps else unknown}


def _first(numbers: Mapping[str, object], *names: str) -> str:
    """The first of the names that is there."""
    return next(name for name in names if name in numbers)


def _value(ours: Given, flag: str, usual: float) -> float:
    """The number that a flag of ours has, else the usual one."""
    return product([ours.get(flag, ())]) or usual
