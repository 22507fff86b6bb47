"""A tool that runs Python code in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import tempfile

PYTHON_TIMEOUT_S = 5.0
PYTHON_MEMORY_MIB = 512
PYTHON_OUTPUT_BYTES = 16_384
DRAIN_S = 1.0

# Limits are set by the child itself: running Python between fork and exec can deadlock a process that has threads.
_LIMITED = """
import resource, sys
for kind, limit in (("CPU", {cpu_s}), ("AS", {memory}), ("CORE", 0), ("FSIZE", {file})):
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (limit, limit))
exec(compile(sys.stdin.read(), "<code>", "exec"), {{"__name__": "__main__"}})
"""


async def run_python(code: str, timeout_s: float = PYTHON_TIMEOUT_S, memory_mib: int = PYTHON_MEMORY_MIB) -> str:
    """Run Python code in a new process, in an empty folder, without the environment's variables.

    Time, memory and output are limited, and the process and its children are killed at the end. These limits contain
    mistakes, not malice: the code may read the user's files and use the network. Isolate the whole run against malice.

    Args:
        code: Program to run.
        timeout_s: Time limit.
        memory_mib: Limit of address space, MiB.

    Returns:
        Standard output and standard error in the order of writing, and a last line if the program was stopped.
    """
    setup = _LIMITED.format(cpu_s=math.ceil(timeout_s) + 1, memory=memory_mib * 2**20, file=16 * 2**20)
    with tempfile.TemporaryDirectory(prefix="agentrl-python-", ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", setup),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder},
            start_new_session=True,
        )
        stopped = ""
        output = bytearray()
        try:
            async with asyncio.timeout(timeout_s):
                stopped = await _exchange(process, code, output)
        except TimeoutError:
            stopped = f"stopped after {timeout_s:g} s"
        finally:
            await _end(process)
    text = output.decode(errors="replace").rstrip("\n")
    return "\n".join(filter(None, (text, stopped and f"[{stopped}]")))


async def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program; only what it prints is returned.
    """
    return await run_python(code)


async def _exchange(process: asyncio.subprocess.Process, code: str, output: bytearray) -> str:
    """Send the code and collect output until the end; return the reason if the program was stopped, else ""."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(code.encode(errors="replace"))
        await process.stdin.drain()
    process.stdin.close()
    while chunk := await process.stdout.read(4096):
        output += chunk
        if len(output) > PYTHON_OUTPUT_BYTES:
            del output[PYTHON_OUTPUT_BYTES:]
            return f"stopped after {PYTHON_OUTPUT_BYTES} bytes of output"
    code_ = await process.wait()
    return f"ended by {signal.Signals(-code_).name}" if code_ < 0 else ""


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the process and its children and wait for it; the rest of the pipe is read, so that the pipe closes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            await process.communicate()
