"""Removal of containers by their label, in this process or after its end.

Run as ``python -I -S reaper.py OWNER PROGRAM...`` with standard input at a pipe, it waits until that closes. Unless the owner has said
there that nothing is left, the owner has ended, however it ended; then its containers and its folder are removed. It holds its standard
output open until it ends. It is run beside a busy process, and therefore needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

OWNER, RUN, TRIAL = "agentrl.owner", "agentrl.run", "agentrl.trial"
"""Labels of containers: ``MACHINE:FOLDER`` of the process that made them, the run that it plays for, and one trial of Harbor's."""
CALL_S = 60.0
LATE_S = 60.0
"""Seconds for which containers that are being made when their owner ends are waited for."""
AGAIN_S = 0.5
MAKING_S, MAKING_AGAIN_S = 20.0, 0.05
DONE = b"done"
"""Written by an owner that has removed all by itself."""


def call(program: Sequence[str], *words: str) -> str:
    """Return what podman or docker print; "" if they fail."""
    try:
        done = subprocess.run([*program, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def remove_containers(program: Sequence[str], owner: str) -> bool:
    """Remove the containers of an owner that is gone, and return True if there were any.

    One that is being made is waited for: podman forgets a container that is removed while it starts, and leaves its processes.
    """
    deadline = time.monotonic() + MAKING_S
    while _is_making(owner) and time.monotonic() < deadline:
        time.sleep(MAKING_AGAIN_S)
    found = call(program, "ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={OWNER}={owner}").split()
    if found:
        call(program, "rm", "--force", "--volumes", *found)
    return bool(found)


def owners(program: Sequence[str]) -> set[str]:
    """Return the owners of all containers."""
    found = call(program, "ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={OWNER}").split()
    return set(call(program, "inspect", "--format", f'{{{{index .Config.Labels "{OWNER}"}}}}', *found).split()) if found else set()


def _is_making(owner: str) -> bool:
    """Return True while a program of the owner makes a container, whose label it was told."""
    told = f"{OWNER}={owner}"
    return any(told in words for words in _command_lines())


def _command_lines() -> Iterator[list[str]]:
    """Yield the words of each process but this one."""
    if not os.path.isdir("/proc/self"):  # macOS
        for line in call(("ps", "-axww", "-o", "pid=,args=")).splitlines():
            pid, *words = line.split()
            if int(pid) != os.getpid():
                yield words
        return
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                yield Path("/proc", name, "cmdline").read_text(errors="replace").split("\0")


def _trees() -> Any:
    spec = importlib.util.spec_from_file_location("trees", Path(__file__).with_name("trees.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(owner: str, program: Sequence[str]) -> None:
    """Wait for the end of the owner, then remove what it left."""
    if sys.stdin.buffer.read() == DONE:
        return
    deadline = time.monotonic() + LATE_S
    while True:
        is_making = _is_making(owner)  # looked at first: a container that is ready now is found below
        if (not remove_containers(program, owner) and not is_making) or time.monotonic() > deadline:
            break
        time.sleep(AGAIN_S)
    _trees().remove(Path(owner.partition(":")[2]))


if __name__ == "__main__":
    if os.fork():  # so that it is no child of the owner: a worker of Ray ends its children when it is lost
        os._exit(0)
    main(sys.argv[1], sys.argv[2:])
