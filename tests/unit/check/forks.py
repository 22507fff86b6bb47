"""Runs checks in processes that are forked from one that has the modules loaded, which saves their import every time.

Run as a program it is that one: each line of its standard input is a request, each line of its output what became of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from typing import IO


def forked(request: bytes, names: Mapping[str, str], output: IO[bytes], limit_s: float) -> int | None:
    """`agentrl.check.supervise.Run` for tests."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.NamedTemporaryFile() as file:
        file.write(request)
        file.flush()
        order = {"request": file.name, "names": dict(names), "output": str(output.name)}
        server.stdin.write(json.dumps(order).encode() + b"\n")
        server.stdin.flush()
        child = int(server.stdout.readline())
        ready, _, _ = select.select([server.stdout], [], [], limit_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        code = int(server.stdout.readline())
        return code if ready else None


@lru_cache
def _server() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)


def end_server() -> None:
    """End the process that forks, if there is one."""
    if _server.cache_info().currsize:
        _server().communicate(timeout=10)
        _server.cache_clear()


def _serve() -> None:
    from agentrl.check import worker as check_worker  # what is shared is loaded here, once

    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if not child:
            os.setsid()
            _redirect(order["request"], os.O_RDONLY, 0)
            _redirect(order["output"], os.O_WRONLY | os.O_APPEND, 1)
            os.dup2(1, 2)
            sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
            os.environ.update(order["names"])
            check_worker.main()
            os._exit(0)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _redirect(path: str, flags: int, number: int) -> None:
    descriptor = os.open(path, flags)
    os.dup2(descriptor, number)
    os.close(descriptor)


if __name__ == "__main__":
    _serve()
