"""Programs that hold sandboxes, named where settings are checked and where they are used."""

import shutil

from agentrl.core.operating_system import on_linux

BUBBLEWRAP = "bwrap"
BUBBLEWRAP_REMEDY = (
    "Install bubblewrap 0.8 or later (apt-get install bubblewrap), or run programs without a wall: --sandbox none"
    if on_linux()
    else "It is for Linux only: choose --sandbox container with podman or docker, or run programs without a wall: --sandbox none"
)
CONTAINERS = ("podman", "docker")
CONTAINERS_REMEDY = "Install podman (apt-get install podman) or docker (apt-get install docker.io), or choose --sandbox local"
KEY = "AGENTRL_SANDBOX_KEY"
"""Environment variable with the key that a server of sandboxes asks for, and a client gives."""
DEFAULT_IMAGE = "docker.io/library/python:3.12-slim-bookworm"
"""Image of containers for which none is named: it has Python, and little else."""
HOLDERS = {"local": ((BUBBLEWRAP,), BUBBLEWRAP_REMEDY), "container": (CONTAINERS, CONTAINERS_REMEDY)}
"""Programs of which one holds the sandboxes of a kind, and what to do where there is none."""


def has_holder(kind: str) -> bool:
    """Return True if a program that holds sandboxes of a kind is installed, and runs on this operating system."""
    return (kind != "local" or on_linux()) and any(map(shutil.which, HOLDERS[kind][0]))
