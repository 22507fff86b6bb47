"""The folder of all sandboxes of a process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentrl.env.sandbox import folders


def test_threads_that_begin_together_have_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_root", None)
    together = threading.Barrier(8)

    def first() -> object:
        together.wait()
        return folders.own_root()

    with ThreadPoolExecutor(8) as threads:
        made = {threads.submit(first) for _ in range(8)}
        assert len({each.result() for each in made}) == 1
