"""Images of containers: pulled by name, or built from a Containerfile once and cached by their content."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

from agentrl.core.errors import SandboxError
from agentrl.env.isolation import launcher
from agentrl.env.sandbox.engine import Engine, process_limits
from agentrl.env.sandbox.folders import own_root
from agentrl.env.sandbox.program import SHOWN
from agentrl.env.timing import timed

NAMES = ("Containerfile", "Dockerfile")
REPOSITORY = "localhost/agentrl-sandbox"
AGAIN_S = 0.1
ABORT_S = 60.0
"""Seconds in which a build that is to end has removed what it made, or is killed."""
_ready: set[tuple[Engine, str]] = set()  # images that were found to be there


def is_path(image: str) -> bool:
    """Return True for the path of a Containerfile, or of a folder with one, False for the name of an image."""
    return image.startswith(("/", "."))


async def ready_image(engine: Engine, image: str, timeout_s: float) -> str:
    """Return the name of an image that is there, after pulling or building it if it was not.

    Args:
        engine: Podman or docker.
        image: Name of an image; or the path of a Containerfile or of a folder with one.
        timeout_s: Time limit of pulling or building.

    Raises:
        SandboxError: If there is no such image, or its Containerfile fails.
    """
    file = await asyncio.to_thread(find_containerfile, image) if is_path(image) else None
    name = f"{REPOSITORY}:{await asyncio.to_thread(content_hash, file)}" if file else image
    if (engine, name) in _ready:
        return name
    # The folder itself is locked: a file for the lock in it would change the hash of its content.
    descriptor = os.open(file.parent if file else own_root(), os.O_RDONLY | os.O_CLOEXEC)
    try:
        while not _locks(descriptor):  # noqa: ASYNC110 - another sandbox, perhaps of another process, makes the same image
            await asyncio.sleep(AGAIN_S)
        # Asked again: another sandbox may have made the image while this one waited for the lock.
        if (engine, name) not in _ready and (await engine.call("image", "inspect", name)).code:
            with timed("sandbox build"):
                await (_build(engine, file, name, timeout_s) if file else _pull(engine, name, timeout_s))
        _ready.add((engine, name))
    finally:
        os.close(descriptor)
    return name


def find_containerfile(image: str) -> Path:
    """Return the Containerfile at a path; `SandboxError` if there is none."""
    path = Path(image).absolute()
    files = [path / name for name in NAMES] if path.is_dir() else [path]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise SandboxError(f"there is no {' or '.join(NAMES) if path.is_dir() else 'file'} at {image!r}; name an image, or such a file")
    return file


def content_hash(file: Path) -> str:
    """Return a name for the content of a Containerfile and of its folder: names, rights, links and bytes of all files."""
    digest = hashlib.sha256(file.name.encode())
    for parent, folders, names in os.walk(file.parent):
        folders.sort()
        for name in sorted((*folders, *names)):
            path = Path(parent, name)
            mode = path.lstat().st_mode
            digest.update(f"\0{path.relative_to(file.parent)}\0{mode:o}\0".encode())
            if stat.S_ISLNK(mode):
                digest.update(os.readlink(path).encode())
            elif stat.S_ISREG(mode):
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _pull(engine: Engine, name: str, timeout_s: float) -> None:
    answer = await engine.call("pull", "--quiet", name, timeout_s=timeout_s)
    answer.check(f"there is no image {name!r} here, and {engine.program[0]} cannot pull it")


async def _build(engine: Engine, file: Path, name: str, timeout_s: float) -> None:
    """Build an image in a process that does not outlive this one."""
    limits = process_limits(1024) if engine.is_podman else ()
    wait_s = ABORT_S if engine.is_podman else 0.0  # docker's daemon removes what it made when its client is gone
    words = (*engine.program, "build", *limits, "--force-rm", "--tag", name, "--file", str(file), str(file.parent))
    watched, held = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", launcher.__file__, launcher.GUARD, str(watched), str(wait_s), *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(watched,),
        )
        output = asyncio.create_task(process.communicate())
        done, _ = await asyncio.wait({output}, timeout=timeout_s)
    finally:  # a build that is still under way fails now, and removes what it made
        os.close(held)
        os.close(watched)
    text = (await output)[0].decode(errors="replace").strip()
    if not done:
        raise SandboxError(f"{file} was not built within {timeout_s:g} s; allow more in SandboxSpec(build_timeout_s=...)")
    if process.returncode:
        raise SandboxError(f"{file} cannot be built: {text[-SHOWN:]}")
