"""Sandboxes on another machine, held by a server that ``agentrl serve-sandboxes`` runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

from agentrl.core.errors import RemoteError, SandboxError
from agentrl.core.sandboxes import KEY
from agentrl.env.isolation.launcher import MIB
from agentrl.env.remote.http import HttpLimits, HttpSession, JsonClient, SharedClient
from agentrl.env.sandbox import protocol
from agentrl.env.sandbox.files import copy_out_beneath
from agentrl.env.sandbox.folders import own_root
from agentrl.env.sandbox.images import is_path
from agentrl.env.sandbox.spec import Command, ExecResult, SandboxSpec, current_choice
from agentrl.env.timing import timed

LIMITS = HttpLimits(timeout_s=120.0, attempt_timeout_s=protocol.WAIT_S + 50.0, attempts=8, max_bytes=protocol.MAX_BODY, connections=256)
OPEN_S = 3600.0
"""Seconds for which a full server is asked again; the time limit of building an image is the server's."""
TOLD, FULL = (404, 422), 503
AGAIN_S = 1.0
_clients: dict[str, SharedClient] = {}


class RemoteSandbox:
    """A sandbox of a server. Requests may be sent again: they name the sandbox and the program, which a server starts once.

    Args:
        spec: Form of the sandbox; the server chooses its kind.
    """

    python = "python3"

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self._path = f"{protocol.ROOT}/{secrets.token_hex(16)}"
        self._url = current_choice().url
        self._session = HttpSession(headers={"Authorization": f"Bearer {os.environ.get(KEY, '')}"})
        self._client: JsonClient | None = None
        self._lease: asyncio.Task[None] | None = None
        self._num_programs = 0

    @property
    def folder(self) -> Path:
        """Refuse: the folder is the server's."""
        raise SandboxError("the folder of a remote sandbox is on its server; use read, write, copy_in and copy_out")

    async def open(self) -> None:
        """Have the server make the sandbox."""
        if is_path(self.spec.image) or self.spec.read:
            given = f"read = {self.spec.read}" if self.spec.read else f"image = {self.spec.image!r}"
            raise SandboxError(f"{given} is on this machine, and the sandbox is not; use copy_in, or name an image that the server has")
        if not self._url:
            raise SandboxError("a remote sandbox needs the address of its server; set --sandbox-url")
        shared = _clients.setdefault(self._url, SharedClient(lambda url=self._url: JsonClient([url], LIMITS)))  # type: ignore[misc]
        self._client = shared.open()
        body = {"spec": protocol.spec_fields(self.spec), "run": current_choice().run}
        try:
            async with asyncio.timeout(OPEN_S):
                answer = await self._opened(body)
        except TimeoutError:
            raise SandboxError(f"{self._url} had no place for a sandbox, or did not open it, within {OPEN_S:g} s") from None
        self.python = str(answer.get("python", self.python))
        self._lease = asyncio.create_task(self._renew())

    async def _opened(self, body: dict[str, Any]) -> dict[str, Any]:
        """Ask again while the server is full, and while it opens the sandbox."""
        while (answer := await self._call("PUT", "", body, told=(*TOLD, FULL))).get("state") != "open":
            if "state" in answer:
                body = {}
            else:
                await asyncio.sleep(AGAIN_S)
        return answer

    async def exec(self, command: Command) -> ExecResult:
        """Run a program to its end, and end all that it started."""
        if command.read or command.connect:
            given = f"read = {command.read}" if command.read else f"network = {command.connect!r}"
            raise SandboxError(f"{given} is on this machine, and the sandbox is not; use copy_in, and network=True")
        self._num_programs += 1
        path, body = f"/programs/{self._num_programs}", protocol.command_fields(command)
        try:
            with timed("sandbox exec"):
                while (answer := await self._call("PUT", path, body)).get("state") == "running":
                    # The server has the program by now, so its standard input is not sent again.
                    body = {}
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError):
                # Shielded, since the program would go on at the server if this request were cancelled too.
                await asyncio.shield(self._call("DELETE", path))
            raise
        try:
            return ExecResult(code=int(answer["code"]), output=str(answer["output"]), ended=answer["ended"])
        except (KeyError, TypeError, ValueError) as error:
            raise SandboxError(f"{self._url}: the answer is no outcome of a program: {error}") from error

    async def read(self, name: str, limit: int) -> bytes:
        """Return the content of a file."""
        return self._bytes(await self._call("POST", "/read", {"name": name, "limit": limit}))

    async def write(self, name: str, data: bytes) -> None:
        """Write a file and the folders above it."""
        await self._call("POST", "/write", {"name": name, "data": protocol.pack(data)})

    async def copy_in(self, source: Path, name: str) -> None:
        """Replace a file or folder of the sandbox by one of this machine."""
        await self._call("POST", "/copy_in", {"name": name, "data": await asyncio.to_thread(protocol.pack_folder, source)})

    async def copy_out(self, name: str, target: Path) -> None:
        """Make a folder of this machine with the plain files of one of the sandbox."""
        answer = await self._call("POST", "/copy_out", {"name": name})
        with tempfile.TemporaryDirectory(dir=own_root()) as scratch:
            try:
                await asyncio.to_thread(protocol.unpack_folder, answer.get("data"), Path(scratch))
            except ValueError as error:
                raise SandboxError(f"{self._url}: the answer {error}") from error
            await asyncio.to_thread(copy_out_beneath, Path(scratch), "copy", target, self.spec.disk_mib * MIB)

    async def end(self) -> None:
        """Have the server remove the sandbox; if it cannot be reached, it does so by itself after a while."""
        if self._lease is not None:
            self._lease.cancel()
        if self._client is not None:
            with contextlib.suppress(SandboxError):
                await self._call("DELETE", "")
            self._client = None
            await _clients[self._url].close()

    def _bytes(self, answer: dict[str, Any]) -> bytes:
        try:
            return protocol.unpack(answer.get("data"))
        except ValueError as error:
            raise SandboxError(f"{self._url}: the answer {error}") from error

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(protocol.LEASE_S / 4)
            with contextlib.suppress(SandboxError):
                await self._call("POST", "/lease")

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None, told: tuple[int, ...] = TOLD) -> dict[str, Any]:
        if self._client is None:
            raise SandboxError("the sandbox is not open; use it as in `async with Sandbox() as sandbox:`")
        try:
            reply = await self._client.call(method, self._path + path, body or {}, session=self._session, told=told)
            answer = reply.json()
        except RemoteError as error:
            raise SandboxError(f"the server of sandboxes failed: {error}") from error
        if not isinstance(answer, dict):
            raise SandboxError(f"{self._url}: the answer is no object")
        if reply.status == 404:
            raise (
                FileNotFoundError(str(answer.get("error")))
                if path == "/read" or path == "/copy_out"
                else SandboxError(str(answer.get("error")))
            )
        if reply.status == 422:
            raise SandboxError(f"{self._url}: {answer.get('error')}")
        return answer
