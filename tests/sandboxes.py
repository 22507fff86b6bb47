"""Kinds of sandboxes that this machine holds, for tests that need one."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from agentrl.core.errors import SandboxError
from agentrl.env.sandbox.engine import Engine, find_engine
from agentrl.env.sandbox.local import check_local

IMAGE = "localhost/agentrl-tests:base"
PACKAGES = "python3,procps"
MIRROR = "http://deb.debian.org/debian"


def problem() -> str:
    """Return the reason for which local sandboxes do not work here, "" if they do."""
    try:
        check_local()
    except SandboxError as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(problem()), reason=problem())


@cache
def container_engine() -> Engine:
    """Return podman or docker with the image `IMAGE`, which is made of Debian's packages; skip the test if that is not possible."""
    try:
        engine = find_engine()
    except SandboxError as error:
        pytest.skip(str(error))
    if subprocess.run([*engine.program, "image", "inspect", IMAGE], capture_output=True, check=False).returncode:
        _make_image(engine)
    return engine


def _make_image(engine: Engine) -> None:
    if not shutil.which("mmdebstrap"):
        pytest.skip("an image for tests is made by mmdebstrap (apt-get install mmdebstrap), which is not here")
    make = ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", "-", MIRROR]
    with subprocess.Popen(make, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as making:
        done = subprocess.run([*engine.program, "import", "-", IMAGE], stdin=making.stdout, capture_output=True, check=False)
    if making.returncode or done.returncode:
        pytest.skip("no image for tests could be made of Debian's packages")


@contextmanager
def built_images(engine: Engine) -> Iterator[None]:
    """Remove the images that a test builds."""
    before = images(engine)
    yield
    for image in images(engine) - before:
        subprocess.run([*engine.program, "rmi", "--force", image], capture_output=True, check=False)


def images(engine: Engine) -> set[str]:
    """Return the ids of all images."""
    listed = subprocess.run([*engine.program, "images", "--all", "--quiet", "--no-trunc"], capture_output=True, text=True, check=False)
    return set(listed.stdout.split())


def containers(engine: Engine, root: Path | str = "") -> list[str]:
    """Return the ids of containers whose owner's folder is `root`, or of those of all owners."""
    label = f"label=agentrl.owner={socket.gethostname()}:{root}" if root else "label=agentrl.owner"
    listed = subprocess.run([*engine.program, "ps", "--all", "--quiet", "--filter", label], capture_output=True, text=True, check=False)
    return listed.stdout.split()
