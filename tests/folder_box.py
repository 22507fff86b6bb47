"""A container that a folder plays, for fast tests: absolute names of the container lie below it, and programs run without a wall."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentrl.env.sandbox.spec import ExecResult, SandboxSpec

PLACES = r"(?<![\w/])/(?=(?:app|tests|logs|solution)\b)"
"""The slash of a name that lies below the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One program that ran: how, and what was there by then, of the tests and of all boxes."""

    words: tuple[str, ...]
    env: Mapping[str, str]
    timeout_s: float
    network: bool | str | None
    had_tests: bool
    num_open: int


class FolderBox:
    """Stands in for `Sandbox`.

    Attributes:
        boxes: All that were made, in order; emptied by the test.
        ran: Programs that ran here.
        is_open: True until its end.
    """

    boxes: list[FolderBox] = []  # noqa: RUF012 - the instances of a test, which reads them
    kind = "container"

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec, self.is_open = spec, False
        self.ran: list[Ran] = []
        self.boxes.append(self)

    async def __aenter__(self) -> FolderBox:
        self.root = Path(tempfile.mkdtemp(prefix="agentrl-box-"))
        self.folder = self.root / "sandbox"
        self.folder.mkdir()
        self.is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_open = False
        shutil.rmtree(self.root)

    async def exec(
        self,
        *words: str,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        timeout_s: float = 60.0,
        network: bool | str | None = None,
        output: int = 0,
        keep: Literal["first", "last"] = "first",
    ) -> ExecResult:
        """Run a program in place of the one of a container."""
        had_tests = (self.root / "tests").exists()
        num_open = sum(box.is_open for box in self.boxes)
        told = {"words": words, "env": dict(env or {}), "timeout_s": timeout_s, "network": network}
        self.ran.append(Ran(**told, had_tests=had_tests, num_open=num_open))  # type: ignore[arg-type]
        place = Path(self._named(cwd)) if cwd else self.folder
        place.mkdir(parents=True, exist_ok=True)
        variables = {"PATH": os.environ["PATH"], **(env or {})}
        process = await asyncio.create_subprocess_exec(
            *map(self._named, words),
            cwd=place,
            env=variables,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(min(timeout_s, 60.0)):
                printed, problem = await process.communicate()
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            return ExecResult(code=-9, output="", ended="timeout")
        assert process.returncode is not None
        return ExecResult(code=process.returncode, output=(printed + problem).decode())

    async def read(self, name: str) -> bytes:
        """Return the content of a file."""
        return await asyncio.to_thread(Path(self._named(name)).read_bytes)

    async def write(self, name: str, data: str) -> None:
        """Write a file below the working folder."""
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(data)

    async def copy_in(self, source: Path, name: str) -> None:
        """Copy a file or folder in."""
        await asyncio.to_thread(self._copy_in, source, Path(self._named(name)))

    def _copy_in(self, source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)

    async def copy_out(self, name: str, target: Path) -> None:
        """Copy a folder out."""
        shutil.copytree(self._named(name), target)

    def _named(self, word: str) -> str:
        return re.sub(PLACES, f"{self.root}/", word)


def programs(box: FolderBox) -> list[Any]:
    """Return the programs of a box but the shell's."""
    return [ran for ran in box.ran if ran.words[0] not in ("sh", "mkdir")]
