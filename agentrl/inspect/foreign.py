"""Files of episodes that other systems wrote, as records that every reader here understands, as far as they go.

There are no tokens in them, so turns have texts alone; what a file does not say stays unknown.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from agentrl.core.errors import ConfigError
from agentrl.inspect.directory import TRAJECTORIES
from agentrl.track.index import IndexWriter
from agentrl.track.jsonl import JsonLines
from agentrl.track.sinks import MAX_LINE_BYTES, encode_capped

Row: TypeAlias = Mapping[str, Any]

PROMPTS = ("prompt", "input", "question", "query", "instruction")
ANSWERS = ("completion", "output", "response", "generated", "answer_text", "prediction")
REWARDS = ("reward", "rewards", "score")
LABELS = ("label", "answer", "target", "ground_truth", "reference")
ATTACHMENT = "attachment://"
"""Begins the names of long values that a log of Inspect keeps apart."""
ZSTD = 93
"""Number of the compression in an archive."""
NAME_LENGTH = 26
"""Offset of the length of its name in the head of a file in an archive."""
FORMS = """Known are: lines of JSON with a prompt, an answer and a reward (OpenRLHF, verifiers), and the logs of Inspect (.eval, .json)."""


def import_file(path: Path, folder: Path) -> int:
    """Write the episodes of a file into a directory of a run, and return their number.

    Args:
        path: Lines of JSON with one episode each, or a log of Inspect.
        folder: The directory, which is there and empty.

    Raises:
        ConfigError: If the file is of no known form, or holds no episode.
    """
    records = _records(path)
    index, lines, count = IndexWriter(folder / TRAJECTORIES), JsonLines(folder / TRAJECTORIES), 0
    groups: dict[str, int] = {}
    try:
        for record in records:
            task = record["task"]["id"]
            record = {**record, "group_id": groups.setdefault(task, len(groups))}
            line = encode_capped(record, 10 * MAX_LINE_BYTES)
            lines.write(line)
            index.add(record, len(line))
            count += 1
    # The module `zipfile` raises `NotImplementedError` for a compression that it does not know.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, NotImplementedError, zipfile.BadZipFile) as error:
        raise _unusable(path, f"cannot be read: {type(error).__name__}: {error}") from error
    finally:
        lines.close()
        index.close()
    if not count:
        raise _unusable(path, "holds no episode of a known form")
    return count


def _unusable(path: Path, problem: str) -> ConfigError:
    return ConfigError("RUN", str(path), problem, FORMS)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".eval":
        return _inspect_archive(path)
    if path.suffix == ".json":
        return _inspect_log(path)
    if path.suffix == ".jsonl":
        return _lines(path)
    raise _unusable(path, f"ends with {path.suffix!r}, which is no known kind of file")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of OpenRLHF and of verifiers, and lines of this package's own."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue  # a last line that was cut off, or no JSON
            if isinstance(row, dict) and isinstance(row.get("turns"), list) and "trajectory_id" in row:
                yield {"task": {"id": "?"}, **row}
            elif isinstance(row, dict) and (record := _row_record(row, number)) is not None:
                yield record


def _row_record(row: Row, number: int) -> dict[str, Any] | None:
    """Return the record of an episode of one row; `None` if the row has no answer."""
    prompt, answer = _first(row, PROMPTS), _first(row, ANSWERS)
    messages = row.get("messages")
    if answer is None and isinstance(messages, list):
        messages = [*_as_messages(prompt, "user"), *messages] if prompt is not None else messages
    elif answer is not None:
        messages = [*_as_messages(prompt, "user"), *_as_messages(answer, "assistant")]
    else:
        return None
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and not isinstance(value, bool)}
    left = {name: value for name, value in numbers.items() if name not in REWARDS and name != "id" and not name.endswith(("_ms", "_id"))}
    name = str(row.get("example_id", row.get("id", number)))
    return _record(
        name=f"{name}-{number}" if "example_id" in row or "id" in row else name,
        task={"id": name if "example_id" in row else _short(prompt, name), "prompt": prompt, "label": _first(row, LABELS)},
        metadata=row.get("info") or row.get("metadata") or {},
        messages=messages,
        error=str(row["error"]) if row.get("error") else None,
        reward=_number(_first(row, REWARDS)),
        metrics={**left, **_numbers(row.get("metrics"))},
        timings={name.removesuffix("_ms") + "_s": value / 1000.0 for name, value in numbers.items() if name.endswith("_ms")},
    )


def _inspect_archive(path: Path) -> Iterator[dict[str, Any]]:
    """Samples of a log of Inspect in its archive form, one in memory at a time."""
    with zipfile.ZipFile(path) as archive:
        items = [item for item in archive.infolist() if item.filename.startswith("samples/") and item.filename.endswith(".json")]
        for number, item in enumerate(items):
            data = _zstd(path, item) if item.compress_type == ZSTD else archive.read(item)
            yield _sample_record(json.loads(data), number)


def _zstd(path: Path, item: zipfile.ZipInfo) -> bytes:
    """Return a file of an archive in the compression that newer versions of Inspect use, which this Python's zipfile does not know."""
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError("RUN", str(path), "is compressed with zstd, which needs pyarrow", "pip install 'agentrl[data]'.") from error
    with path.open("rb") as file:
        # The file's own head says where its bytes begin; its extra field may differ from that in the archive's directory.
        file.seek(item.header_offset + NAME_LENGTH)
        name, extra = struct.unpack("<HH", file.read(4))
        file.seek(name + extra, 1)
        packed = file.read(item.compress_size)
    return bytes(pyarrow.CompressedInputStream(pyarrow.BufferReader(packed), "zstd").read())


def _inspect_log(path: Path) -> Iterator[dict[str, Any]]:
    log = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(log, dict) or not isinstance(log.get("samples"), list):
        raise _unusable(path, "is no log of Inspect: it has no list of samples")
    for number, sample in enumerate(log["samples"]):
        yield _sample_record(sample, number)


def _sample_record(sample: Row, number: int) -> dict[str, Any]:
    scores = {name: score.get("value") for name, score in (sample.get("scores") or {}).items()}
    values = {name: value for name, score in scores.items() if (value := _grade(score)) is not None}
    epoch = int(sample.get("epoch", 1))
    return _record(
        name=f"{sample.get('id', number)}-{epoch}",
        task={"id": str(sample.get("id", number)), "prompt": sample.get("input"), "label": sample.get("target"), "epoch": epoch - 1},
        metadata=sample.get("metadata") or {},
        messages=sample.get("messages") or _as_messages(sample.get("input"), "user"),
        attachments=sample.get("attachments") or {},
        error=(sample.get("error") or {}).get("message"),
        reward=next(iter(values.values()), None),
        reward_parts=values if len(values) > 1 else {},
        timings={"total_s": float(sample["total_time"])} if sample.get("total_time") is not None else {},
    )


def _grade(value: Any) -> float | None:
    """Return a score as a number; Inspect writes C for correct, P for partially, I for incorrect and N for no answer."""
    grades = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
    return grades.get(value) if isinstance(value, str) else _number(value)


def _record(
    *,
    name: str,
    task: dict[str, Any],
    metadata: Any,
    messages: Sequence[Any],
    error: str | None,
    reward: float | None,
    attachments: Row = MappingProxyType({}),
    **fields: Row,
) -> dict[str, Any]:
    """The record of an episode, which failed if it has an error; `fields` are named parts of the reward, metrics and timings."""
    return {
        "trajectory_id": name,
        "episode_id": name,
        **dict.fromkeys(("group_id", "attempt", "version"), 0),
        "agent": "",
        "frozen": False,
        "task": {"epoch": 0, "position": 0, "seed": None, "images": [], "metadata": metadata, **task},
        "status": "env_error" if error else "finished",
        "reward": None if error else reward,
        "reward_parts": {},
        "score": None if error or reward is None else min(max(reward, 0.0), 1.0),
        "metrics": {},
        "error": error,
        "timings": {},
        "turns": list(_turns(messages, reward or 0.0)),
        **fields,
        **({"images": images} if (images := list(_images(messages, attachments))) else {}),
    }


def _turns(messages: Sequence[Any], reward: float) -> Iterator[dict[str, Any]]:
    """A turn for each message of the assistant, with the messages before it as its prompt; the last one has the reward."""
    spoken = [{"role": str(m.get("role", "user")), "text": _text(m)} for m in messages if isinstance(m, Mapping)]
    places = [place for place, message in enumerate(spoken) if message["role"] == "assistant"]
    start = 0
    for number, place in enumerate(places):
        before, start = spoken[start:place], place + 1
        yield {
            "prompt_text": "\n\n".join(f"{message['role']}: {message['text']}" for message in before),
            "prompt_messages": before,
            "text": spoken[place]["text"],
            **{name: [] for name in ("prompt_ids", "token_ids", "logprobs", "versions")},
            "finish_reason": None,
            "fresh": False,
            "number": number,
            "reward": reward if place == places[-1] else 0.0,
            "temperature": None,
            "info": {},
        }


def _images(messages: Sequence[Any], attachments: Row) -> Iterator[list[Any]]:
    """Data URLs of images in messages, each with the number of the turn that reads it; other images are left where they are."""
    number = 0
    for message in messages:
        parts = message.get("content") if isinstance(message, Mapping) else None
        for part in parts if isinstance(parts, list) else ():
            source = (part.get("image_url") or part.get("image")) if isinstance(part, Mapping) else None
            source = source.get("url") if isinstance(source, Mapping) else source
            if isinstance(source, str) and source.startswith(ATTACHMENT):
                source = attachments.get(source.removeprefix(ATTACHMENT))
            if isinstance(source, str) and source.startswith("data:image/"):
                yield [number, source]
        number += isinstance(message, Mapping) and message.get("role") == "assistant"


def _text(message: Row) -> str:
    """Return the content of a message as text, with its tool calls."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", f"[{part.get('type', 'part')}]")) for part in content if isinstance(part, Mapping))
    calls = [call if isinstance(call, str) else json.dumps(call, default=str) for call in message.get("tool_calls") or ()]
    return "\n".join([*([str(content)] if content else []), *calls])


def _as_messages(value: Any, role: str) -> list[Any]:
    if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        return value
    return [] if value is None else [{"role": role, "content": value if isinstance(value, str) else json.dumps(value)}]


def _first(row: Row, names: Iterable[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _number(value: Any) -> float | None:
    if isinstance(value, list) and value and all(isinstance(item, int | float) for item in value):
        return float(sum(value))
    return float(value) if isinstance(value, int | float) else None


def _numbers(values: Any) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)} if isinstance(values, Mapping) else {}


def _short(prompt: Any, default: str) -> str:
    """Return a name for a task that has none: the end of its prompt, which tells tasks apart better than the beginning."""
    text = _text(prompt[-1]) if isinstance(prompt, list) and prompt and isinstance(prompt[-1], Mapping) else prompt
    return text.strip()[-60:] if isinstance(text, str) and text.strip() else default
