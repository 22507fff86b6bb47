"""Every line of docs/one_gpu.md is what ``agentrl plan`` says, and what a run on such a GPU chooses by itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl.config.load import read_flags
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.model_shape import find_shape
from agentrl.resolve import memory
from agentrl.resolve.commands import TRAIN
from agentrl.resolve.plan import with_defaults
from agentrl.resolve.sizing.memory import GIB
from agentrl.resolve.sizing.plan import Hardware, Plan, Workload, divide, make_plan
from agentrl.resolve.sizing.search import memory_remedy

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "one_gpu.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d+) \| (qwen[\w.-]+) \| [^|]+ \| `([^`]*)` \| ([\d.]+) \| ([\d,]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
REFUSED = re.findall(r"^\| (\d+) \| (qwen[\w.-]+) \| `([^`]*)` \| ([^|]+) \|$", PAGE, re.MULTILINE)
SAVINGS = re.compile(r"--(?:zero-stage|micro-batch-tokens|weight-bucket-mib) \d+|--gradient-checkpointing|--offload optimizer")


def planned(gib: str, model: str, flags: str) -> Plan:
    path = str(ROOT / "docs" / "models" / f"{model}.json")
    shape, hardware = find_shape(path), Hardware(gpus=1, gpu_bytes=float(gib) * GIB)
    config = divide(with_defaults(read_flags(TRAIN, ["--model", path, *flags.split()])).settings, shape, hardware)
    return make_plan(config, shape, hardware, Workload())


@pytest.mark.parametrize(("gib", "model", "flags", "learner", "tokens", "host"), ROWS)
def test_a_line_is_what_the_plan_says(gib: str, model: str, flags: str, learner: str, tokens: str, host: str) -> None:
    plan = planned(gib, model, flags)
    assert plan.problems == []
    assert (f"{plan.learner_bytes / GIB:.1f}", f"{plan.engine.cache_tokens:,}") == (learner, tokens)
    assert f"{plan.host_bytes / GIB:.1f}" == host


@pytest.mark.parametrize(("gib", "model", "flags", "problem"), REFUSED)
def test_a_line_that_does_not_fit_has_no_remedy(gib: str, model: str, flags: str, problem: str) -> None:
    plan = planned(gib, model, flags)
    assert plan.problems[0] == problem
    assert memory_remedy(plan, Workload()) is None


def test_every_size_has_lines() -> None:
    assert {row[0] for row in ROWS} == {"8", "16", "24", "48", "80"}
    assert len(ROWS) >= 20
    assert len(REFUSED) >= 4


@pytest.mark.parametrize(("gib", "model", "flags"), [row[:3] for row in ROWS])
def test_a_run_chooses_the_settings_that_save_memory_by_itself(gib: str, model: str, flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_bytes", lambda: 1024.0 * GIB)
    line, asked = planned(gib, model, flags).config, planned(gib, model, SAVINGS.sub("", flags)).config
    chosen = memory.with_shares(changed(asked, max_new_tokens=1535), float(gib) * GIB)
    assert chosen.learner == line.learner
    assert chosen.weights.weight_bucket_mib == line.weights.weight_bucket_mib
    assert memory.savings(asked, chosen).count("--") == len(SAVINGS.findall(flags))


def test_a_run_that_fits_keeps_its_settings() -> None:
    config = planned("80", "qwen2.5-1.5b", "").config
    assert memory.savings(config, memory.with_shares(config, 80 * GIB)) == ""
    several: TrainConfig = changed(config, num_learners=2, num_engines=2, colocate=True)
    assert memory.savings(several, memory.with_shares(several, 8 * GIB)) == ""
