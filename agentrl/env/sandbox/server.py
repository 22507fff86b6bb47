"""A server that holds sandboxes for clients on other machines; docs/sandbox_server.md describes its requests."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hmac
import logging
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from agentrl.core.errors import SandboxError
from agentrl.core.sandboxes import KEY
from agentrl.core.serving import ApiError, ClientLeftError, Receive, Scope, Send, json_object, read_body, send_json
from agentrl.env.sandbox import protocol
from agentrl.env.sandbox.files import MAX_FILE
from agentrl.env.sandbox.folders import own_root
from agentrl.env.sandbox.sandbox import Sandbox
from agentrl.env.sandbox.spec import Command, ExecResult, SandboxChoice, SandboxSpec, use_choice

_log = logging.getLogger(__name__)
LOOK_S = 1.0
"""Seconds between two looks for sandboxes whose clients are gone."""
Answer: TypeAlias = dict[str, Any]


class _Held:
    """A sandbox of a client.

    Args:
        spec: Form that the client asks for.
        choice: Settings of the server.
    """

    def __init__(self, spec: SandboxSpec, choice: SandboxChoice) -> None:
        self.used_s = time.monotonic()
        self.programs: dict[str, asyncio.Task[ExecResult]] = {}
        self.context = contextvars.copy_context()
        self.context.run(use_choice, choice)
        self._closing = asyncio.Event()
        self.opening: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(spec), context=self.context)

    async def _hold(self, spec: SandboxSpec) -> None:
        """Keep the sandbox open until `end`; one task opens and ends it."""
        try:
            async with Sandbox(spec) as sandbox:
                self.opening.set_result(sandbox)
                await self._closing.wait()
                for program in self.programs.values():
                    program.cancel()
                await asyncio.gather(*self.programs.values(), return_exceptions=True)
        except Exception as error:
            if not self.opening.done():
                self.opening.set_exception(error)
            else:
                _log.exception("a sandbox did not end well")

    def start(self, number: str, command: Command) -> None:
        """Start a program, unless the client asks for it again."""
        if number not in self.programs:
            work = self.opening.result().exec(*command.words, **_arguments(command))
            self.programs[number] = asyncio.create_task(work, context=self.context)

    async def end(self) -> None:
        """End the sandbox, also one that is not open yet."""
        self._closing.set()
        if not self.opening.done():
            self._task.cancel()
        await asyncio.wait({self._task})
        if not self.opening.done():
            self.opening.set_exception(SandboxError("the sandbox was ended before it was open"))
        with contextlib.suppress(Exception):
            # Read here, since asyncio complains of an exception that nobody has read.
            self.opening.exception()


def _arguments(command: Command) -> dict[str, Any]:
    names = ("timeout_s", "stdin", "env", "cwd", "network", "output", "keep")
    return {name: getattr(command, name) for name in names}


class SandboxServer:
    """Holds the sandboxes of clients that know its key, as an ASGI application.

    Its loop `watch` consumes nothing and removes the sandboxes of clients that are not heard of any more; it is unblocked by cancellation.

    Args:
        key: The key.
        choice: Settings of the sandboxes.
        max_running: Sandboxes at a time; a client that asks for more is told to come again.
    """

    def __init__(self, key: str, choice: SandboxChoice, max_running: int) -> None:
        self._key, self._choice, self._max_running = key, choice, max_running
        self._held: dict[str, _Held] = {}
        self.num_opened = 0

    async def watch(self) -> None:
        """Remove the sandboxes of clients that are gone, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            oldest = time.monotonic() - protocol.LEASE_S
            await asyncio.gather(*(self._end(name) for name, held in list(self._held.items()) if held.used_s < oldest))

    async def close(self) -> None:
        """End every sandbox."""
        await asyncio.gather(*map(self._end, list(self._held)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        try:
            self._authorize(dict(scope["headers"]))
            body = await read_body(receive, protocol.MAX_BODY)
            answer = await self._route(scope["method"], scope["path"], json_object(body) if body else {})
            await send_json(send, 200, answer)
        except ClientLeftError:
            return
        except ApiError as problem:
            again = {"retry-after": "1"} if problem.status == 503 else None
            await send_json(send, problem.status, {"error": problem.message}, again)
        except (SandboxError, ValueError) as error:
            await send_json(send, 422, {"error": str(error)})
        except FileNotFoundError as error:
            await send_json(send, 404, {"error": str(error)})
        except Exception as error:  # a fault must reach one client only
            _log.exception("a request could not be answered")
            await send_json(send, 500, {"error": f"{type(error).__name__}: {error}"})

    def _authorize(self, headers: dict[bytes, bytes]) -> None:
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
        # An ordinary comparison takes longer the more of a guess is right.
        if not hmac.compare_digest(given, self._key.encode()):
            raise ApiError(401, f"the key is not that of this server; set {KEY} for the client")

    async def _route(self, method: str, path: str, body: Answer) -> Answer:
        if not path.startswith(protocol.ROOT + "/"):
            raise ApiError(404, f"there is no {path}; there is {protocol.ROOT}/ID")
        name, _, rest = path.removeprefix(protocol.ROOT + "/").partition("/")
        if method == "DELETE" and not rest:
            await self._end(name)
            return {}
        if method == "PUT" and not rest:
            return await self._open(name, body)
        held = self._held.get(name)
        if held is None:
            raise ApiError(404, "there is no such sandbox; its client was not heard of for too long, or the server was started again")
        held.used_s = time.monotonic()
        # Shielded: a client that leaves cancels its request, and not the opening that a later request waits for.
        sandbox = await asyncio.shield(held.opening)
        part, _, number = rest.partition("/")
        if part == "programs" and number:
            return await self._program(held, method, number, body)
        act = ACTS.get(part)
        if act is None or method != "POST":
            raise ApiError(404, f"there is no {method} {path}; there are PUT and DELETE programs/N, and POST {', '.join(ACTS)}")
        return await asyncio.create_task(act(sandbox, body), context=held.context)

    async def _open(self, name: str, body: Answer) -> Answer:
        if name not in self._held:
            if len(self._held) >= self._max_running:
                raise ApiError(503, f"the server holds {self._max_running} sandboxes already (--max-running)")
            if "spec" not in body:
                raise ApiError(404, "there is no such sandbox, and no spec of a new one")
            run = body.get("run", "")
            choice = replace(self._choice, run=run if isinstance(run, str) else "")
            self._held[name] = _Held(protocol.read_spec(body["spec"]), choice)
            self.num_opened += 1
        held = self._held[name]
        held.used_s = time.monotonic()
        await asyncio.wait({held.opening}, timeout=protocol.WAIT_S)
        if not held.opening.done():
            return {"state": "opening"}
        try:
            return {"state": "open", "python": held.opening.result().python}
        except Exception:
            await self._end(name)
            raise

    async def _program(self, held: _Held, method: str, number: str, body: Answer) -> Answer:
        if method == "DELETE":
            if (program := held.programs.get(number)) is not None:
                program.cancel()
                await asyncio.wait({program})
            return {}
        if number not in held.programs and not body:
            raise ApiError(404, f"there is no program {number}")
        if body:
            held.start(number, protocol.read_command(body))
        program = held.programs[number]
        await asyncio.wait({program}, timeout=protocol.WAIT_S)
        held.used_s = time.monotonic()
        if program.cancelled():
            raise SandboxError("the program was ended with its sandbox")
        return protocol.result_fields(program.result()) if program.done() else {"state": "running"}

    async def _end(self, name: str) -> None:
        held = self._held.pop(name, None)
        if held is not None:
            await held.end()


async def _read(sandbox: Sandbox, body: Answer) -> Answer:
    limit = body.get("limit", MAX_FILE)
    if not isinstance(limit, int):
        raise ValueError("limit: must be a number of bytes")
    return {"data": protocol.pack(await sandbox.read(_name(body), min(limit, MAX_FILE)))}


async def _write(sandbox: Sandbox, body: Answer) -> Answer:
    await sandbox.write(_name(body), protocol.unpack(body.get("data")))
    return {}


async def _copy_in(sandbox: Sandbox, body: Answer) -> Answer:
    with tempfile.TemporaryDirectory(dir=own_root()) as scratch:
        source = await asyncio.to_thread(protocol.unpack_folder, body.get("data"), Path(scratch))
        await sandbox.copy_in(source, _name(body))
    return {}


async def _copy_out(sandbox: Sandbox, body: Answer) -> Answer:
    with tempfile.TemporaryDirectory(dir=own_root()) as scratch:
        target = Path(scratch, "copy")
        await sandbox.copy_out(_name(body), target)
        return {"data": await asyncio.to_thread(protocol.pack_folder, target)}


async def _lease(_sandbox: Sandbox, _body: Answer) -> Answer:
    return {}


def _name(body: Answer) -> str:
    name = body.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("name: must be the name of a file")
    return name


ACTS: dict[str, Callable[[Sandbox, Answer], Coroutine[Any, Any, Answer]]] = {
    "read": _read,
    "write": _write,
    "copy_in": _copy_in,
    "copy_out": _copy_out,
    "lease": _lease,
}
