"""A plan beside the files of a run, which are written by hand: what is said to be off, by how much, and the rates that follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.cli.main import main
from agentrl.config.mapping import to_json
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError
from agentrl.core.metrics import MetricSums
from agentrl.core.model_shape import find_shape
from agentrl.learner.engine import Clock
from agentrl.profile.measured import compared_lines, read_measured
from agentrl.resolve.sizing.memory import GIB
from agentrl.resolve.sizing.plan import Hardware, Workload, make_plan

MODEL = str(Path(__file__).parents[3] / "docs" / "models" / "qwen2.5-1.5b.json")
SHARED: dict[str, Any] = {"model": MODEL, "num_engines": 1, "num_learners": 1, "colocate": True, "gradient_checkpointing": True}


def rows(**figures: float) -> list[dict[str, float]]:
    step = {
        "time/step_s": 20.0,
        "time/train_s": 11.0,
        "idle/generator": 0.6,
        "episode/tokens_mean": 600.0,
        "episodes": 128.0,
        "tokens/rows": 128 * 1000.0,
        **figures,
    }
    return [{"step": number + 1, **step, "time/step_s": 20.0 if number else 99.0} for number in range(9)]


def test_a_run_is_read_without_its_first_steps() -> None:
    found = read_measured(rows(**{"memory/peak_gib": 30.0, "engine/kv_tokens": 5e5}), max_staleness=0)
    assert (found.steps, found.step_s, found.train_s, found.generate_s) == (8, 20.0, 11.0, pytest.approx(8.0))
    assert found.workload() == {"prompt_tokens": 400, "answer_tokens": 600}
    assert (found.peak_bytes, found.kv_tokens) == (30 * GIB, 5e5)
    with pytest.raises(ConfigError, match="more steps"):
        read_measured([], max_staleness=0)


def test_a_plan_says_how_far_off_it_is() -> None:
    config, shape, hardware = changed(TrainConfig(), **SHARED), find_shape(MODEL), Hardware(gpus=1, gpu_bytes=80 * GIB)
    measured = read_measured(rows(), max_staleness=0)
    work = Workload(**measured.workload())
    plan = make_plan(config, shape, hardware, work)
    peak = (plan.learner_bytes - GIB) / GIB
    whole = rows(**{"memory/peak_gib": peak / 1.1, "engine/kv_tokens": plan.engine.cache_tokens / 0.8})
    text = list(compared_lines(read_measured(whole, max_staleness=0), plan, work))
    assert [line.rsplit("   ", 1)[1] for line in text[1:3]] == ["10 % too high", "20 % too low"]
    tflops, tokens = text[-1].split()[-3], text[-1].split()[-1]
    assert float(tokens) == pytest.approx(128 * 600 / 8.0)
    again = Workload(**measured.workload(), learner_tflops=float(tflops), decode_tokens_per_s=float(tokens))
    with_rates = list(compared_lines(measured, plan, again))
    assert any("generate, s" in line and line.endswith("right") for line in with_rates)
    train = next(line for line in with_rates if "train, s" in line)
    assert train.endswith(("right", "3 % too high"))  # the start of micro-batches is counted apart


def test_the_command_compares_with_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(to_json(changed(TrainConfig(), agent="envs/arithmetic.py", **SHARED)))
    lines = (json.dumps(row) for row in rows(**{"memory/peak_gib": 30.0}))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    code = main(["plan", "--measured", str(tmp_path), "--gpus", "1", "--gpu", "h100"])
    said = capsys.readouterr().out
    assert code == 0
    assert "measured in 8 steps" in said
    assert "peak of a learner rank, GiB" in said
    assert "episodes of 1,000 tokens" in said
    assert main(["plan", "--measured", str(tmp_path / "none")]) == 2


def test_a_learner_on_a_gpu_tells_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * GIB)
    stats = MetricSums()
    Clock(torch.device("cuda", 0)).record(stats)
    assert (calls, stats.result()["memory/peak_gib"]) == (["reset"], 3.0)
    other = MetricSums()
    Clock(torch.device("cpu")).record(other)
    assert "memory/peak_gib" not in other.result()
