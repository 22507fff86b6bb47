"""The start of each process of vLLM's: there vLLM calls `begin`, by the entry point ``vllm.general_plugins``."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator

from agentrl.core.operating_system import end_with_parent

OWNED = "AGENTRL_ENGINE_OWNED"
"""Environment variable of the processes of an engine of ours; those of other programs that use vLLM have none, and are left alone."""


@contextlib.contextmanager
def owned() -> Iterator[None]:
    """Have the processes of vLLM that are started within the block end when the one that started them does."""
    os.environ[OWNED] = "1"
    try:
        yield
    finally:
        os.environ.pop(OWNED, None)


def begin() -> None:
    """End with the parent: vLLM's core would wait for it for ever, with its memory and its GPU."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None and os.environ.get(OWNED):
        # vLLM is started on a thread of a pool, which may end before its process.
        end_with_parent(parent.pid, started_by_thread=True)
