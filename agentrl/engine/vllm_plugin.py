"""The start of each process of vLLM's: there vLLM calls `begin`, by the entry point ``vllm.general_plugins``."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

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
    """Watch over the parent: vLLM's core would wait for it for ever, with its memory and its GPU."""
    parent = multiprocessing.parent_process()
    if parent is not None and os.environ.get(OWNED):
        threading.Thread(target=_outlive, args=(parent,), name="agentrl-parent", daemon=True).start()


def _outlive(parent: BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
