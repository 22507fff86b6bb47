"""Messages over the sockets: pickles to an episode's process, and JSON of plain values from it, checked again on arrival."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from agentrl.core.errors import EnvError, EnvResultError, EnvTimeoutError
from agentrl.core.types import Prompt, Span, Task
from agentrl.env.agent import ResetResult, SamplingParams, StepResult, StepState, make_step_state
from agentrl.env.results import MAX_TEXT, RawText, check_reset, check_step
from agentrl.env.timing import MAX_NAME, MAX_SPANS, TOOL

MAX_ANSWER = 32 * 2**20
MAX_ERROR = 20_000
MAX_SECONDS = 1e6
"""Times of tools that are longer are not believed."""
HEADER = struct.Struct("!II")
"""Length of what follows, and number of the call that it is, or that it answers."""

_ERRORS = {cls.__name__: cls for cls in (EnvError, EnvTimeoutError, EnvResultError)}
_RESET, _STEP = (tuple(field.name for field in fields(cls) if field.name != "observation") for cls in (ResetResult, StepResult))


def framed(body: bytes, number: int) -> bytes:
    """The body with its header before it."""
    return HEADER.pack(len(body), number) + body


def pack_reset(task: Task, seed: int, where: str) -> bytes:
    """Pack a call of `reset`; `EnvError` if the task cannot be pickled."""
    try:
        return pickle.dumps(("reset", task, seed), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever a user's label raises
        problem = f"{where}: task {task.id!r} cannot be sent to the environment's process: {type(error).__name__}: {error}"
        raise EnvError(f"{problem}; use plain values in label and metadata") from error


def pack_step(state: StepState) -> bytes:
    """A call of `step`; the task stays where it is."""
    values = {key: value for key, value in state.items() if key not in ("task", "label")}
    values["sampling_params"] = dict(state.sampling_params)
    return pickle.dumps(("step", values), pickle.HIGHEST_PROTOCOL)


def step_state(values: Mapping[str, Any], task: Task) -> StepState:
    """The state that `pack_step` packed, with the task of the episode."""
    return make_step_state(**{**values, "sampling_params": SamplingParams(values["sampling_params"]), "task": task})


def encode_result(result: ResetResult | StepResult, where: str, spans: Sequence[Span] = ()) -> bytes:
    """Return a checked result in JSON, with the times of tools; `EnvResultError` if it holds what JSON cannot say, or is too large."""
    names = _STEP if isinstance(result, StepResult) else _RESET
    data = {name: getattr(result, name) for name in names}
    raw = isinstance(result.observation, RawText)
    data["raw" if raw else "chat"] = result.observation
    try:
        body = json.dumps({"result": data, **_times(spans)}, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        problem = "the result must be made of texts, numbers, lists and dictionaries to leave the environment's process"
        raise EnvResultError(f"{where}: {problem}: {error}") from error
    if len(body) > MAX_ANSWER:
        raise EnvResultError(f"{where} returned a result of {len(body)} bytes: {MAX_ANSWER} are allowed")
    return body


def encode_error(error: EnvError, hint: str = "", spans: Sequence[Span] = ()) -> bytes:
    """An error in JSON, with the times of tools; the hint goes to the end of its first line."""
    first, line, rest = str(error).partition("\n")
    kind = type(error).__name__
    text = (first + hint + line + rest)[:MAX_ERROR]
    return json.dumps({"error": text, "kind": kind if kind in _ERRORS else "EnvError", **_times(spans)}).encode()


def decode(body: bytes, where: str) -> dict[str, Any]:
    """Return an answer, which may be an error; `EnvError` if it is none."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise EnvError(f"{where}: its process sent something that is no answer")
    return data


def without_error(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer, or raise the `EnvError` that it carries."""
    if "error" in answer:
        raise _ERRORS.get(str(answer.get("kind")), EnvError)(str(answer["error"])[:MAX_ERROR])
    return answer


def _times(spans: Sequence[Span]) -> dict[str, Any]:
    return {"spans": [[span.name, span.start_s, span.seconds] for span in spans]} if spans else {}


def spans_of(answer: Mapping[str, Any]) -> tuple[Span, ...]:
    """Return the times of tools of an answer; what is none is left out."""
    found = answer.get("spans")
    rows = found[:MAX_SPANS] if isinstance(found, list) else ()
    return tuple(Span(row[0], None, float(row[1]), float(row[2])) for row in rows if _is_time(row))


def _is_time(row: Any) -> bool:
    if not isinstance(row, list) or len(row) != 3 or not isinstance(row[0], str):
        return False
    named = row[0].startswith(TOOL) and len(row[0]) <= len(TOOL) + MAX_NAME
    return named and all(isinstance(number, int | float) and 0 <= number < MAX_SECONDS for number in row[1:])


def decode_reset(answer: dict[str, Any], where: str, prompt: Prompt, agents: Sequence[str]) -> ResetResult:
    """Return the result of `reset`, checked as if nothing had checked it before, or raise the `EnvError` that it carries."""
    data, raw = _result(answer, where)
    result = check_reset(ResetResult(data.get("chat"), **_given(data, _RESET)), where, prompt, agents)
    return result if raw is None else replace(result, observation=raw)


def decode_step(answer: dict[str, Any], where: str, agents: Sequence[str]) -> StepResult:
    """Return the result of `step`, checked as if nothing had checked it before, or raise the `EnvError` that it carries."""
    data, raw = _result(answer, where)
    observation = data.get("chat") if raw is None else "raw"
    result = check_step(StepResult(observation=observation, **_given(data, _STEP)), where, agents)
    return result if raw is None else replace(result, observation=raw)


def _result(answer: dict[str, Any], where: str) -> tuple[dict[str, Any], RawText | None]:
    data = without_error(answer).get("result")
    raw = data.get("raw") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not (raw is None or (isinstance(raw, str) and len(raw) <= MAX_TEXT)):
        raise EnvError(f"{where}: its process sent something that is no answer")
    return data, None if raw is None else RawText(raw)


def _given(data: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: data[name] for name in names if name in data}


def encode_closed(*, clean: bool, reusable: bool, log: list[str]) -> bytes:
    """Return the answer to ``close``; clean: no call was given up, no descendant is left; reusable: it waits for another episode."""
    return json.dumps({"clean": clean, "reusable": reusable, "log": [line[:MAX_ERROR] for line in log]}).encode()
