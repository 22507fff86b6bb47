"""Messages between a run and an episode's process: pickles go there, JSON of plain values comes back and is checked again on arrival."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from agentrl.core.errors import EnvError, EnvResultError, EnvTimeoutError, NotScoredError
from agentrl.core.types import Span, Task
from agentrl.env.agent import ResetResult, SamplingParams, StepResult, StepState
from agentrl.env.results import RawText
from agentrl.env.states import make_step_state
from agentrl.env.timing import MAX_NAME, MAX_SPANS, TOOL

MAX_ANSWER = 32 * 2**20
MAX_ERROR = 20_000
MAX_SECONDS = 1e6
"""Times of tools that are longer are not believed."""
HEADER = struct.Struct("!II")
"""Length of what follows, and number of the call that it is, or that it answers."""

_ERRORS = {cls.__name__: cls for cls in (EnvError, EnvTimeoutError, EnvResultError, NotScoredError)}

_Result = TypeVar("_Result", ResetResult, StepResult)


class Channel:
    """Bodies over a socket, each after its length and the number of the call that it is, or that it answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._head: tuple[int, int] | None = None  # of a body that is not complete, so that a cancelled `read` loses nothing

    @classmethod
    async def open(cls, connection: socket.socket) -> Channel:
        """Return a channel over a socket, which it owns from then on."""
        return cls(*await asyncio.open_connection(sock=connection))

    async def read(self, limit: int | None = None) -> tuple[int, bytes]:
        """Return number and body of the next message.

        Raises:
            EOFError: If the other side has closed the socket.
            EnvError: If the message is longer than `limit` bytes.
        """
        if self._head is None:
            self._head = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        size, number = self._head
        if limit is not None and size > limit:
            raise EnvError(f"its process sent {size} bytes, more than {limit}; it was killed")
        body = await self._reader.readexactly(size)
        self._head = None
        return number, body

    def write(self, body: bytes, number: int) -> None:
        """Send a message as soon as there is room."""
        self._writer.write(HEADER.pack(len(body), number) + body)

    async def drain(self) -> None:
        """Wait until there is room."""
        await self._writer.drain()

    def abort(self) -> None:
        """Close at once; who reads gets `EOFError`."""
        self._writer.transport.abort()


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
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    answer = {"result": values, "raw": isinstance(result.observation, RawText), **_times(spans)}
    try:
        body = json.dumps(answer, separators=(",", ":")).encode()
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
    rows = answer.get("spans")
    return (
        tuple(Span(row[0], None, float(row[1]), float(row[2])) for row in rows[:MAX_SPANS] if _is_time(row))
        if isinstance(rows, list)
        else ()
    )


def _is_time(row: Any) -> bool:
    if not isinstance(row, list) or len(row) != 3 or not isinstance(row[0], str):
        return False
    named = row[0].startswith(TOOL) and len(row[0]) <= len(TOOL) + MAX_NAME
    return named and all(isinstance(number, int | float) and 0 <= number < MAX_SECONDS for number in row[1:])


def decode_result(cls: type[_Result], answer: dict[str, Any], where: str, check: Callable[[_Result], _Result]) -> _Result:
    """Return the result in an answer once `check` has normalised it, as if nothing had before, or raise the `EnvError` that it carries."""
    data = without_error(answer).get("result")
    if not isinstance(data, dict):
        raise EnvError(f"{where}: its process sent something that is no answer")
    result = check(cls(**{field.name: data[field.name] for field in fields(cls) if field.name in data}))
    text = data.get("observation") if answer.get("raw") is True else None
    return replace(result, observation=RawText(text)) if isinstance(text, str) else result


def encode_copies(pids: Sequence[int]) -> bytes:
    """Return the answer to ``copy``: the ids of the processes that are copies."""
    return json.dumps({"copies": list(pids)}).encode()


def pids_of(answer: dict[str, Any], count: int, where: str) -> list[int]:
    """Return the ids of so many copies, or raise the `EnvError` that the answer carries, or is."""
    pids = without_error(answer).get("copies")
    # `isinstance` would accept True as a number, and user code may have written the answer.
    if not isinstance(pids, list) or len(pids) != count or not all(type(pid) is int and pid > 1 for pid in pids):
        raise EnvError(f"{where}: its process sent something that is no answer")
    return pids


def encode_closed(*, clean: bool, reusable: bool, log: list[str]) -> bytes:
    """Return the answer to ``close``; clean: no call was given up, no descendant is left; reusable: it waits for another episode."""
    return json.dumps({"clean": clean, "reusable": reusable, "log": [line[:MAX_ERROR] for line in log]}).encode()
