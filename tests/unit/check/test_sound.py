"""Environments that are right: the ones that come with agentrl, and the adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from agentrl.assets import VISION_MODEL
from tests.unit.check.support import checked, ids

ROOT = Path(__file__).parents[3]
OPENRLHF = ROOT / "tests" / "openrlhf_files"
PROMPTS = str(OPENRLHF / "prompts.jsonl")

JUSTIFIED = {
    "code": {"reward-constant"},  # only a program that works earns anything, and no player without a model writes one
    "extra_logs": {"constant-solves"},  # it pays for short answers, and none is shorter than the empty one
    "reward_func": {"constant-solves"},  # `label in answer`: an answer that lists every number is always right
    "sampling": {"constant-solves"},  # the same
    "swe": {"prompt-near-limit", "observation-huge"},  # it shows the module, and commands print it; the bundled model reads 1024 tokens
}
SHORT = {"code": 8.0, "swe": 8.0}
"""Seconds for environments that start a process in every turn."""

PICTURES = {"picture_grid", "shapes"}
"""Environments for models that read images."""
SLOW = {"code", "picture_grid", "reasoning", "sql", "swe"}
GYMNASIUM = (
    pytest.param("gym:FrozenLake-v1", marks=pytest.mark.slow),
    "gym:Blackjack-v1",
    pytest.param("gym:Taxi-v4?num_tasks=20", marks=pytest.mark.slow),
)
SUITES = {
    "reasoning_gym": "reasoning-gym:count_bits?max_n=63",
    "gem": "gem:game:GuessTheNumber-v0-easy",
    "textarena": "textarena:TowerOfHanoi-v0?num_disks=2",
}


def _ready_made() -> list[ParameterSet]:
    files = sorted((ROOT / "envs").glob("*.py"))
    return [pytest.param(file, id=file.stem, marks=[pytest.mark.slow] if file.stem in SLOW else []) for file in files]


@pytest.mark.parametrize("file", _ready_made())
def test_ready_made_environments(file: Path) -> None:
    model = {"model": VISION_MODEL} if file.stem in PICTURES else {}
    report = checked(str(file), budget_s=SHORT.get(file.stem, 60.0), **model)
    assert ids(report) == JUSTIFIED.get(file.stem, set()), [finding.seen for finding in report.findings]
    assert report.skipped == [] or file.stem in SHORT


@pytest.mark.parametrize("spec", GYMNASIUM)
def test_gymnasium(spec: str) -> None:
    report = checked(spec)
    assert ids(report) == set(), [finding.seen for finding in report.findings]


@pytest.mark.slow
@pytest.mark.parametrize(("package", "spec"), SUITES.items())
def test_suites(package: str, spec: str) -> None:
    pytest.importorskip(package)
    report = checked(spec)
    assert ids(report) == set(), [finding.seen for finding in report.findings]


@pytest.mark.parametrize(
    "name", ["extra_logs", "feedback", *(pytest.param(name, marks=pytest.mark.slow) for name in ("reward_func", "sampling", "single_turn"))]
)
def test_files_of_openrlhf(name: str) -> None:
    report = checked(str(OPENRLHF / f"{name}.py"), prompts=PROMPTS)
    assert ids(report) == JUSTIFIED.get(name, set()), [finding.seen for finding in report.findings]
    assert report.env["tasks"] == 16


def test_a_reward_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "exact.py"
    file.write_text("def reward(completion, label):\n    return float(completion.strip() == label)\n")
    assert ids(checked(str(file), prompts=PROMPTS)) == set()
