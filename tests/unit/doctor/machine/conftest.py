"""A cache of the test's own, in which measured rates are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.core.paths import CACHE


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
