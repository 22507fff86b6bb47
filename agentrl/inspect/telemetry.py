"""Recorded episodes for other viewers: a log of Inspect, and spans of OpenTelemetry."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from agentrl.config.mapping import flattened
from agentrl.core.errors import ConfigError
from agentrl.core.files import complete_file
from agentrl.core.types import FinishReason, Status
from agentrl.env.timing import TOOL
from agentrl.inspect.pieces import split_messages
from agentrl.inspect.reader import RunReader
from agentrl.rollout.records import started_s
from agentrl.track.jsonl import encode

Record: TypeAlias = Mapping[str, Any]

ROLES = ("system", "user", "assistant", "tool")
STOP_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "max_tokens"}
PRODUCER = "agentrl"


def export_inspect(run: RunReader, path: Path) -> int:
    """Write the recorded episodes as a log of Inspect in JSON, and return their number; a task's episodes are its epochs.

    Raises:
        ConfigError: If nothing is recorded, or the file exists or cannot be written.
    """
    return _write(run, path, ".json", lambda records: _inspect_text(run, records))


def export_spans(run: RunReader, path: Path) -> int:
    """Write the recorded episodes as OpenTelemetry traces, a line of OTLP in JSON for each, and return their number.

    Raises:
        ConfigError: If nothing is recorded with times, or the file exists or cannot be written.
    """
    lines = (encode(_traces(run, record)) + "\n" for record in run.directory.records() if has_times(record))
    return _write(run, path, ".jsonl", lambda records: lines)


def _write(run: RunReader, path: Path, suffix: str, make: Any) -> int:
    if path.suffix != suffix:
        raise ConfigError("OUT", str(path), f"is no name of a {suffix} file", f"Name a file that ends with {suffix}.")
    if path.exists():
        raise ConfigError("OUT", str(path), "exists", "Name a new file.")
    count = 0

    def counted(parts: Iterable[str]) -> Iterator[str]:
        nonlocal count
        for part in parts:
            # A newline follows each sample or trace, and JSON on one line holds no other.
            count += part.count("\n")
            yield part

    try:
        with complete_file(path) as partial, partial.open("w", encoding="ascii") as file:
            file.writelines(counted(make(run.directory.records())))
            if not count:
                raise ConfigError("RUN", str(run.path), "has no recorded episode that can be exported", "Train with --record all.")
    except OSError as error:
        raise ConfigError("OUT", str(path), f"cannot be written: {error.strerror or error}", "Name another place.") from error
    return count


def _inspect_text(run: RunReader, records: Iterable[Record]) -> Iterator[str]:
    """The log in parts; a newline follows each sample."""
    settings, started = flattened(run.settings), (run.launches or [{}])[0].get("started_s")
    created = datetime.fromtimestamp(started or 0, UTC).isoformat()
    agent = str(settings.get("agent", run.path.name))
    spec = {
        "run_id": run.path.name,
        "created": created,
        "task": Path(agent.partition(":")[0]).stem or "episodes",
        "task_id": run.path.name,
        "task_args": {},
        "dataset": {"name": agent},
        "model": f"{PRODUCER}/{settings.get('model') or 'tiny'}",
        "model_args": {},
        "config": {},
        "packages": {},
        "metadata": {"run": str(run.path), "algorithm": settings.get("advantage_estimator")},
    }
    config: dict[str, Any] = {name: settings[name] for name in ("temperature", "top_p") if name in settings}
    config |= {"max_tokens": settings["max_new_tokens"]} if "max_new_tokens" in settings else {}
    head = {"version": 2, "status": "success", "eval": spec, "plan": {"name": "plan", "steps": [], "config": config}}
    # The log is written in parts, so that only one sample at a time is in memory.
    yield encode(head)[:-1] + ', "samples": ['
    epochs: Counter[str] = Counter()
    first = True
    for record in records:
        if record.get("clipped") or not isinstance(record.get("turns"), list):
            continue
        name = str((record.get("task") or {}).get("id", "?")) + (f" {record['agent']}" if record.get("agent") else "")
        epochs[name] += 1
        yield ("" if first else ", ") + encode(_sample(record, name, epochs[name], str(spec["model"]))) + "\n"
        first = False
    yield "]}"


def _sample(record: Record, name: str, epoch: int, model: str) -> dict[str, Any]:
    task, turns = record.get("task") or {}, record["turns"]
    messages = [message for turn in turns for message in _messages(turn, model)]
    rewards = {"reward": record.get("reward"), "score": record.get("score"), **(record.get("reward_parts") or {})}
    label = task.get("label")
    last = messages[-1] if messages else {"role": "assistant", "content": "", "source": "generate", "model": model}
    reason = STOP_REASONS.get(turns[-1].get("finish_reason"), "unknown") if turns else "unknown"
    sample = {
        "id": name,
        "epoch": epoch,
        "input": _task_input(task.get("prompt")),
        "target": label if isinstance(label, str) else "" if label is None else json.dumps(label),
        "messages": messages,
        "output": {"model": model, "choices": [{"message": last, "stop_reason": reason}]},
        "scores": {part: {"value": value} for part, value in rewards.items() if value is not None},
        "metadata": {
            **{part: record.get(part) for part in ("trajectory_id", "episode_id", "group_id", "attempt", "version", "status")},
            "metrics": record.get("metrics") or {},
        },
        "store": {},
        "events": [],
        "model_usage": {model: _usage(turns)},
        "attachments": {},
        "uuid": record.get("trajectory_id"),
    }
    if (total_s := (record.get("timings") or {}).get("total_s")) is not None:
        sample["total_time"] = total_s
    if _failed(record):
        text = str(record.get("error") or record.get("status"))
        sample["error"] = {"message": text, "traceback": text, "traceback_ansi": text}
    return sample


def _messages(turn: Record, model: str) -> Iterator[dict[str, Any]]:
    prompt = str(turn.get("prompt_text", ""))
    for message in turn.get("prompt_messages") or split_messages(prompt) or [{"role": "user", "text": prompt}]:
        yield {"role": _role(message), "content": message["text"]}
    yield {"role": "assistant", "content": str(turn.get("text", "")), "source": "generate", "model": model}


def _usage(turns: Iterable[Record]) -> dict[str, int]:
    read = written = context = 0
    for turn in turns:
        fresh, sampled = len(turn.get("prompt_ids", ())), len(turn.get("token_ids", ()))
        context = fresh if turn.get("fresh") else context + fresh
        read, written, context = read + context, written + sampled, context + sampled
    return {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}


def _task_input(prompt: Any) -> Any:
    if not isinstance(prompt, list):
        return str(prompt)
    messages = [message for message in prompt if isinstance(message, Mapping)]
    return [{"role": _role(message), "content": str(message.get("content"))} for message in messages]


def _role(message: Record) -> str:
    return str(message["role"]) if message.get("role") in ROLES else "user"


def _failed(record: Record) -> bool:
    return record.get("status") not in (Status.FINISHED, Status.TRUNCATED)


def has_times(record: Record) -> bool:
    """Return True if a record says when its episode was played."""
    return bool(record.get("spans")) and started_s(record) is not None


def _traces(run: RunReader, record: Record) -> dict[str, Any]:
    """The trace of one trajectory: a span for the episode, and one in it for each wait."""
    # Ids follow from names, so that an export that is repeated gives the same traces.
    trace = _digest(16, run.path.name, record.get("trajectory_id"), record.get("attempt", 0))
    root = _digest(8, trace)
    origin = started_s(record) or 0.0
    total_s = float((record.get("timings") or {}).get("total_s") or record.get("group_s") or 0.0)
    names = ("trajectory_id", "episode_id", "group_id", "attempt", "version", "agent", "status", "reward", "score")
    about = {f"{PRODUCER}.{name}": record.get(name) for name in names} | {"gen_ai.operation.name": "invoke_agent"}
    about |= {f"{PRODUCER}.task": (record.get("task") or {}).get("id"), "error.type": record.get("error")}
    spans = [_span(trace, root, None, f"episode {record.get('trajectory_id')}", origin, total_s, about, failed=_failed(record))]
    turns = {turn.get("number", place): turn for place, turn in enumerate(record.get("turns") or ())}
    waits = [(_digest(8, trace, place), *wait) for place, wait in enumerate(record["spans"])]
    calls = {number: key for key, name, number, *_ in waits if name in ("reset", "step")}  # turn -> the call that its tools are part of
    for key, name, number, start_s, seconds in waits:
        is_tool = name.startswith(TOOL)
        parent = calls.get(number, root) if is_tool else root
        facts = _facts(name, number, turns.get(number))
        spans.append(_span(trace, key, parent, name.removeprefix(TOOL), origin + start_s, seconds, facts))
    resource = {"attributes": _attributes({"service.name": PRODUCER, f"{PRODUCER}.run": run.path.name})}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": PRODUCER}, "spans": spans}]}]}


def _facts(name: str, number: int | None, turn: Record | None) -> dict[str, Any]:
    """Attributes of a wait: those of its kind that OpenTelemetry's conventions for generative AI name, and its turn."""
    facts: dict[str, Any] = {f"{PRODUCER}.turn": number}
    if name.startswith(TOOL):
        facts |= {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name.removeprefix(TOOL)}
    elif name == "generate" and turn is not None:
        facts |= {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.temperature": turn.get("temperature"),
            "gen_ai.usage.input_tokens": len(turn.get("prompt_ids", ())),
            "gen_ai.usage.output_tokens": len(turn.get("token_ids", ())),
            "gen_ai.response.finish_reasons": [turn.get("finish_reason")],
        }
    return facts


def _span(
    trace: str,
    number: str,
    parent: str | None,
    name: str,
    start_s: float,
    seconds: float,
    about: Mapping[str, Any],
    *,
    failed: bool = False,
) -> dict[str, Any]:
    nanoseconds = round(start_s * 1e9)
    return {
        "traceId": trace,
        "spanId": number,
        **({"parentSpanId": parent} if parent else {}),
        "name": name,
        "kind": 1,
        # OTLP in JSON writes whole numbers of 64 bits as text.
        "startTimeUnixNano": str(nanoseconds),
        "endTimeUnixNano": str(nanoseconds + round(seconds * 1e9)),
        "attributes": _attributes(about),
        "status": {"code": 2} if failed else {},
    }


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _attribute(value)} for key, value in values.items() if value not in (None, "")]


def _attribute(value: Any) -> dict[str, Any]:
    # True is a whole number in Python too, so this comes first.
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [{"stringValue": str(item)} for item in value]}}
    return {"stringValue": str(value)}


def _digest(size: int, *parts: Any) -> str:
    return hashlib.blake2b("\x1f".join(map(str, parts)).encode("utf-8", "replace"), digest_size=size).hexdigest()
