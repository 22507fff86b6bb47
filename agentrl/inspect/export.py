"""Files made from a run: recorded episodes as a data set (JSON lines or Parquet), and a picture of the reward."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.core.files import complete_file
from agentrl.track.jsonl import encode
from agentrl.track.summary import ends
from agentrl.track.text import mean

BATCH = 500
FLAG = "--export"
PLOT_WINDOW = 5
"""Steps in the moving average of a picture."""

KINDS: Mapping[str, Callable[[Any], Any]] = {
    "text": str,
    "json": json.dumps,
    "whole": int,
    "seed": lambda value: None if value is None else int(value),
    "number": float,
    "measured": lambda value: None if value is None else float(value),
    "wholes": lambda values: list(map(int, values)),
    "numbers": lambda values: list(map(float, values)),
    "messages": lambda prompt: _messages(prompt),
    "turns": lambda turns: [_cast(turn, TURN_COLUMNS) for turn in turns],
}
"""Kinds of columns, with the conversion of a value."""

COLUMNS: Mapping[str, str] = {
    **dict.fromkeys(("trajectory_id", "episode_id"), "text"),
    **dict.fromkeys(("group_id", "attempt", "version"), "whole"),
    **dict.fromkeys(("agent", "task_id"), "text"),
    **dict.fromkeys(("epoch", "position"), "whole"),
    "seed": "seed",
    "prompt": "messages",
    "label": "json",
    "metadata": "json",
    "status": "text",
    **dict.fromkeys(("reward", "score"), "measured"),
    "reward_parts": "json",
    "metrics": "json",
    "error": "text",
    "num_turns": "whole",
    "num_tokens": "whole",
    "turns": "turns",
}
"""Column -> kind."""

TURN_COLUMNS: Mapping[str, str] = {
    "prompt_text": "text",
    "text": "text",
    "prompt_ids": "wholes",
    "token_ids": "wholes",
    "logprobs": "numbers",
    "versions": "wholes",
    "finish_reason": "text",
    "reward": "number",
    "temperature": "number",
    "info": "json",
}


def export(records: Iterable[Mapping[str, Any]], path: Path) -> tuple[int, int]:
    """Write records as rows that ``datasets.load_dataset`` reads.

    Values whose type differs between rows (labels, metadata, named rewards and metrics) become JSON text; prompts are messages.

    The ending of `path`, a file that does not exist yet, decides the format: ``.jsonl`` or ``.parquet``.

    Returns:
        Number of rows written, and number of records left out because they were cut or are incomplete.

    Raises:
        ConfigError: If the file has another ending, exists or cannot be written, or if pyarrow is missing.
    """
    writers: dict[str, Callable[[Iterable[dict[str, Any]], Path], int]] = {".jsonl": _write_lines, ".parquet": _write_parquet}
    if path.suffix not in writers:
        raise ConfigError(FLAG, str(path), f"unknown kind of file {path.suffix!r}", "Name a file that ends with .jsonl or .parquet.")
    if path.exists():
        raise ConfigError(FLAG, str(path), "exists already", "Name another file, or remove this one.")
    left_out: list[Any] = []
    try:
        with complete_file(path) as partial:
            # The tuple is made from left to right, so `left_out` is counted after all rows are written.
            return writers[path.suffix](_rows(records, left_out), partial), len(left_out)
    except OSError as error:
        raise ConfigError(FLAG, str(path), f"cannot be written: {error.strerror or error}", "Name another place.") from error


def _rows(records: Iterable[Mapping[str, Any]], left_out: list[Any]) -> Iterator[dict[str, Any]]:
    for record in records:
        try:
            if record.get("clipped"):
                raise ValueError("cut")
            yield _without_surrogates(export_row(record))
        except (KeyError, TypeError, ValueError):
            left_out.append(record.get("trajectory_id"))


def export_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a record; every row has the same columns and types."""
    task, turns = record["task"], record["turns"]
    values = {
        **record,
        **{name: task[name] for name in ("epoch", "position", "prompt", "label", "metadata")},
        "agent": record.get("agent", ""),
        "task_id": task["id"],
        "seed": task.get("seed"),
        "error": record["error"] or "",
        "num_turns": len(turns),
        "num_tokens": sum(len(turn["token_ids"]) for turn in turns),
    }
    return _cast(values, COLUMNS)


def _cast(values: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    return {name: KINDS[kind](values[name]) for name, kind in columns.items()}


def _messages(prompt: Any) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    contents = [(message["role"], message["content"]) for message in prompt]
    return [{"role": str(role), "content": text if isinstance(text, str) else json.dumps(text)} for role, text in contents]


def _write_lines(rows: Iterable[dict[str, Any]], path: Path) -> int:
    count = 0
    with path.open("w", encoding="ascii") as file:
        for row in rows:
            file.write(encode(row) + "\n")
            count += 1
    return count


def _write_parquet(rows: Iterable[dict[str, Any]], path: Path) -> int:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(FLAG, str(path), "needs the package pyarrow", "pip install 'agentrl[data]', or export .jsonl.") from error
    schema, count, rows = _schema(pyarrow), 0, iter(rows)
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        while batch := list(itertools.islice(rows, BATCH)):
            writer.write_table(pyarrow.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


def _without_surrogates(value: Any) -> Any:
    """Replace unpaired surrogates, which Arrow, the reader of both formats, refuses."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {key: _without_surrogates(item) for key, item in value.items()}
    # Lists of numbers, which are nearly all of a record, are not looked through.
    if isinstance(value, list) and value and isinstance(value[0], str | dict):
        return [_without_surrogates(item) for item in value]
    return value


def _schema(arrow: Any) -> Any:
    text, number, whole = arrow.string(), arrow.float64(), arrow.int64()
    types = {"text": text, "json": text, "whole": whole, "seed": whole, "number": number, "measured": number}
    types |= {"wholes": arrow.list_(whole), "numbers": arrow.list_(number)}
    types["messages"] = arrow.list_(arrow.struct([("role", text), ("content", text)]))
    types["turns"] = arrow.list_(arrow.struct([(name, types[kind]) for name, kind in TURN_COLUMNS.items()]))
    return arrow.schema([(name, types[kind]) for name, kind in COLUMNS.items()])


def plot_rewards(metrics: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Draw the mean reward of each step, a moving average, and the means of the first and the last steps; return the number of steps.

    The ending of `path` decides the format, for example ``.png`` or ``.svg``; rows without a reward are skipped.

    Raises:
        ConfigError: If there is no reward, matplotlib is missing, or the file cannot be written.
    """
    points = [(row["step"], row["reward/mean"]) for row in metrics if row.get("reward/mean") is not None]
    if not points:
        raise ConfigError("--plot", str(path), "the run has no rewards in metrics.jsonl", "Name a run that finished a step.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot", str(path), "needs the package matplotlib", "pip install matplotlib") from error
    steps, rewards = zip(*points, strict=True)
    figure = Figure(figsize=(7.5, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, rewards, ".", color="#9ecae1", markersize=6, label="one step")
    smooth = [mean(rewards[max(0, i + 1 - PLOT_WINDOW) : i + 1]) for i in range(len(rewards))]
    axes.plot(steps, smooth, color="#08519c", linewidth=2.2, label=f"mean of {PLOT_WINDOW} steps")
    first, last = ends(len(rewards))
    for part, name, end, side in ((slice(None, first), "first", 0, "left"), (slice(-last, None), "last", -1, "right")):
        level, at = mean(rewards[part]), steps[part]
        axes.hlines(level, at[0], at[-1], color="#d94801", linewidth=1.6)
        label = f"{name} {len(at)} steps: {level:.2f}"
        axes.annotate(label, (at[end], level), (0, -24), textcoords="offset points", ha=side, color="#d94801")
    axes.set(xlabel="optimizer step", ylabel="mean reward")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # matplotlib raises ValueError for an unknown ending
        raise ConfigError("--plot", str(path), f"cannot be written: {error}", "Name a .png or .svg file.") from error
    return len(points)
