"""Runs checks in processes that are forked from one that has the modules loaded, which saves their import every time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import IO, Any

from tests.forks import Forks, kill_group, serve

FORKS = Forks(__name__)


def forked(request: bytes, names: Mapping[str, str], output: IO[bytes], limit_s: float) -> int | None:
    """`agentrl.check.supervise.Run` for tests."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(request)
        file.flush()
        return FORKS.run({"input": file.name, "output": str(output.name), "names": dict(names)}, limit_s)


def _work(order: dict[str, Any]) -> int:
    from agentrl.check import run

    os.environ.update(order["names"])
    run.main()
    os._exit(0)


def _load() -> None:
    from agentrl.check import run  # noqa: F401


if __name__ == "__main__":
    serve(_load, _work, after=kill_group)
