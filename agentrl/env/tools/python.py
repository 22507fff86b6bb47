"""A tool that runs Python code in a sandbox."""

from __future__ import annotations

import math
import signal

from agentrl.env.sandbox.sandbox import Sandbox
from agentrl.env.sandbox.spec import ExecResult, SandboxSpec

PYTHON_TIMEOUT_S = 5.0
PYTHON_MEMORY_MIB = 512
PYTHON_OUTPUT_BYTES = 16_384

_FROM_STDIN = """
import sys
exec(compile(sys.stdin.read(), "<code>", "exec"), {"__name__": "__main__"})
"""


async def run_python(code: str, timeout_s: float = PYTHON_TIMEOUT_S, memory_mib: int = PYTHON_MEMORY_MIB) -> str:
    """Run Python code in a sandbox of its own, in an empty folder, without the environment's variables.

    Time, memory, processes and output are limited, and the process and its children are killed at the end. The code sees the packages
    of this Python, but neither other files nor the network, unless the run asks for ``--sandbox none``.

    Args:
        code: Program to run.
        timeout_s: Time limit.
        memory_mib: Limit of memory, MiB.

    Returns:
        Standard output and standard error in the order of writing, and a last line if the program was stopped.

    Raises:
        SandboxError: If this machine cannot hold such a sandbox.
    """
    spec = SandboxSpec(memory_mib=memory_mib, cpu_s=math.ceil(timeout_s) + 1, file_mib=16, disk_mib=64)
    async with Sandbox(spec) as sandbox:
        words = (sandbox.python, "-I", "-c", _FROM_STDIN)
        result = await sandbox.exec(*words, stdin=code.encode(errors="replace"), timeout_s=timeout_s, output=PYTHON_OUTPUT_BYTES)
    stopped = _reason(result, timeout_s, spec)
    return "\n".join(filter(None, (result.output.rstrip("\n"), stopped and f"[{stopped}]")))


async def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program; only what it prints is returned.
    """
    return await run_python(code)


def _reason(result: ExecResult, timeout_s: float, spec: SandboxSpec) -> str:
    """Return the reason if the program was stopped, else ""."""
    if result.ended == "exit":
        return f"ended by {signal.Signals(-result.code).name}" if result.code < 0 else ""
    limits = {
        "timeout": f"{timeout_s:g} s",
        "output": f"{PYTHON_OUTPUT_BYTES} bytes of output",
        "memory": f"more than {spec.memory_mib} MiB of memory",
        "disk": f"more than {spec.disk_mib} MiB of files",
    }
    return f"stopped after {limits[result.ended]}"
