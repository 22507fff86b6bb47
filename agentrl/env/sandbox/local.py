"""Sandboxes of bubblewrap: own processes, network, mounts and ``/tmp``; of this machine a program sees the system and Python, read-only.

A trainer that is root gives every sandbox a user of its own, so that the limit of processes counts for it alone and root's files stay
root's; any other trainer gives it a user namespace.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from agentrl.core.errors import SandboxError
from agentrl.core.sandboxes import BUBBLEWRAP, BUBBLEWRAP_REMEDY, has_holder
from agentrl.env.isolation import launcher
from agentrl.env.isolation.launcher import MIB
from agentrl.env.sandbox.folders import own_root
from agentrl.env.sandbox.spec import SandboxSpec

PROBE_S = 20.0

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix/store")
CONFIGURATION = ("ld.so.cache", "alternatives", "ssl", "pki", "ca-certificates", "localtime", "passwd", "group", "nsswitch.conf")
NETWORK = ("resolv.conf", "hosts")
MEMORY = ("/dev/shm", "/tmp")
"""Folders of each program that are in memory."""
CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_DAC_READ_SEARCH")
"""Rights with which root enters the folder and becomes another user, who has none."""
USER = 1000
FIRST_USER, NUM_USERS = 2_000_000_000, 100_000_000
"""Users whom no system gives to people."""


def new_user() -> int | None:
    """Return a user id for a sandbox, if this process may take any; `None` if it needs a user namespace."""
    return FIRST_USER + secrets.randbelow(NUM_USERS) if _may_take_users() else None


def wall(spec: SandboxSpec, user: int | None, folder: Path, cwd: str) -> list[str]:
    """Return the words that stand before those of a program, to put it behind the wall; `folder` is its own, under the same name."""
    words = [BUBBLEWRAP, "--die-with-parent", "--as-pid-1", "--hostname", "sandbox", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    words += [] if spec.network else ["--unshare-net"]
    words += ["--cap-drop", "ALL"]
    if user is None:
        words += ["--unshare-user", "--disable-userns", "--uid", str(USER), "--gid", str(USER)]
    else:
        words += [word for name in CAPABILITIES for word in ("--cap-add", name)]
    words += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    words += [word for path in MEMORY for word in ("--size", str(spec.disk_mib * MIB), "--perms", "1777", "--tmpfs", path)]
    shown: list[str] = []
    for path in _visible(spec):
        if not any(Path(path).is_relative_to(above) for above in shown):
            words += [*_parents(path), "--ro-bind-try", path, path]
            shown.append(path)
    words += [*_parents(str(folder)), "--bind", str(folder), str(folder), "--chdir", cwd]
    if user is not None:
        # A process that changes its user forgets that it is to end with its parent.
        words += [
            "setpriv",
            "--pdeathsig=KILL",
            f"--reuid={user}",
            f"--regid={user}",
            "--clear-groups",
            "--inh-caps=-all",
            "--bounding-set=-all",
        ]
    return words


@functools.cache
def check_local() -> None:
    """Try the wall once in this process.

    Raises:
        SandboxError: If it does not stand on this machine.
    """
    if not has_holder("local"):
        raise SandboxError(f"--sandbox local needs the program {BUBBLEWRAP}. {BUBBLEWRAP_REMEDY}.")
    with tempfile.TemporaryDirectory(dir=own_root()) as folder:
        words = [*wall(SandboxSpec(), new_user(), Path(folder), folder), "true"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PROBE_S, check=False)
    if done.returncode:
        raise SandboxError(f"--sandbox local does not work on this machine: {done.stderr.strip()[-300:]}. {BUBBLEWRAP_REMEDY}.")


def _visible(spec: SandboxSpec) -> Iterator[str]:
    yield from SYSTEM
    names = CONFIGURATION + (NETWORK if spec.network else ())
    yield from (f"/etc/{name}" for name in names)
    yield from (sys.base_prefix, sys.prefix, launcher.__file__)
    yield from spec.read


def _parents(path: str) -> list[str]:
    """Make the folders above a path; those that bubblewrap makes by itself can be entered by their owner only."""
    return [word for parent in reversed(Path(path).parents[:-1]) for word in ("--perms", "0755", "--dir", str(parent))]


@functools.cache
def _may_take_users() -> bool:
    if os.geteuid() or not shutil.which("setpriv"):
        return False
    lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    return any(int(first) <= FIRST_USER and int(first) + int(count) >= FIRST_USER + NUM_USERS for first, _, count in map(str.split, lines))
