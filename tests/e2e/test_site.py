"""`make site` builds the documentation site and finds nothing wrong with it."""

from __future__ import annotations

import json
import subprocess
from importlib.metadata import version

import pytest

from tests.e2e.runs import ROOT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_make_site() -> None:
    done = subprocess.run(["make", "--no-print-directory", "site"], cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 problems" in done.stdout
    (name,) = {row["version"] for row in json.loads((ROOT / "site" / "versions.json").read_text(encoding="utf-8"))} & {version("agentrl")}
    index = json.loads((ROOT / "site" / name / "search" / "search_index.json").read_text(encoding="utf-8"))
    titles = {entry["title"] for entry in index["docs"]}
    assert {"Metrics", "Gallery of environments", "Writing an environment"} & titles
    assert any("AgentInstance" in title for title in titles)
    assert not any(entry["location"].startswith("source/") for entry in index["docs"])
