"""Kinds of sandboxes that this machine holds, for tests that need one."""

from __future__ import annotations

import shutil
import socket
import subprocess
from functools import cache
from pathlib import Path

import pytest

from agentrl.core.errors import SandboxError
from agentrl.env.sandbox.engine import Engine, find_engine
from agentrl.env.sandbox.folders import own_root
from agentrl.env.sandbox.images import REPOSITORY, content_hash, find_containerfile
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
    if not has_image(engine, IMAGE):
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


def image_of(folder: Path) -> str:
    """Return the name under which the image of a Containerfile is kept."""
    return f"{REPOSITORY}:{content_hash(find_containerfile(str(folder)))}"


def has_image(engine: Engine, name: str) -> bool:
    """Return True if an image is there."""
    return not subprocess.run([*engine.program, "image", "inspect", name], capture_output=True, check=False).returncode


def builds(engine: Engine) -> set[str]:
    """Return the containers of builds on `IMAGE` that podman has."""
    words = [*engine.program, "ps", "--all", "--external", "--format", "{{.ID}} {{.Names}}"]
    listed = subprocess.run(words, capture_output=True, text=True, check=False).stdout if engine.is_podman else ""
    return {line.split()[0] for line in listed.splitlines() if "agentrl-tests-working" in line}


def containers(engine: Engine, root: Path | None = None) -> list[str]:
    """Return the ids of the containers of an owner, whose folder is `root`; without one of this process."""
    label = f"label=agentrl.owner={socket.gethostname()}:{root or own_root()}"
    listed = subprocess.run([*engine.program, "ps", "--all", "--quiet", "--filter", label], capture_output=True, text=True, check=False)
    return listed.stdout.split()
