"""Everything that `make gpu` measures runs, with sizes so small that a CPU does it in seconds; the figures mean nothing here."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.learner.trees import share_prefixes
from tests.benchmarks import _gpu_checks, gpu
from tests.benchmarks._gpu_checks import Found

TINY = gpu.Sizes(
    model={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    | {"vocab_size": 1024, "tie_word_embeddings": True},
    tokens=64,
    rows=4,
    peaks=(64, 128),
    prompts=((24, 8), (8, 24)),
    members=3,
    adam=1000,
    repeats=1,
    trials=False,
    engines=("transformers",),
    demo_steps=1,
)
ROOT = Path(__file__).parents[3]


def lines(found: dict[str, list[Found]]) -> list[Found]:
    return [line for part in found.values() for line in part]


@pytest.mark.linux
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_every_part_runs_and_has_a_table_on_the_page() -> None:
    before = torch.distributed.is_initialized()  # by another test of this process
    found = gpu.measure(gpu.Bench(TINY, torch.device("cpu")))
    assert torch.distributed.is_initialized() == before
    assert not [line for line in lines(found) if "failed" in line.value or "left out" in line.value or "WRONG" in line.value]
    assert {name: [line.name for line in part] for name, part in found.items() if name != "doctor"} == {
        "speed": [
            "plain loop, transformers with sdpa",
            "plain loop, the same with varlen",
            "plain loop, float32 master weights",
            "plain loop, float32 master weights and varlen",
            "learner",
            "learner over the best plain loop with float32 master weights",
        ],
        "memory": ["peak memory at 64 tokens", "peak memory at 128 tokens"],
        "shared_prompts": ["prompt of 24, 3 answers of 8", "prompt of 8, 3 answers of 24"],
        "demo_transformers": ["transformers: engine and learner, mean difference", "transformers: reward of the calculator"],
        "adam": ["offloaded Adam, 1e9 parameters"],
    }
    assert "limits: shared memory" in [line.name for line in found["doctor"]]
    report = gpu.page(found, "a device")
    assert report.startswith("# `make gpu` on a device\n")
    assert f"torch {torch.__version__}" in report
    assert all(f"| {line.name} | " in report for line in lines(found))
    assert all(f"\n## {gpu.TITLES[name]}\n" in report for name in found)


def test_rows_with_one_prompt_share_it_and_nothing_else() -> None:
    """On an H100 the answers were all the same once, and the tree was a single row."""
    shared = share_prefixes(gpu.batch_of(8, 40, 10), budget=10**9, hidden_size=64, costs=gpu.ALL_SHARED)
    assert [bundle.length for bundle in shared] == [40 + 8 * 9]  # the last token of an answer predicts nothing


def test_a_part_that_fails_is_named_and_does_not_stop_the_others() -> None:
    bench = gpu.Bench(TINY, torch.device("cpu"))

    def broken() -> Any:
        raise RuntimeError("no kernel\nand more")

    bench.pieces = lambda: {"broken": broken, "adam": bench.adam}  # type: ignore[method-assign]
    found = gpu.measure(bench)
    failed, adam = lines(found)
    assert (failed.value, failed.met) == ("failed: RuntimeError: no kernel", False)
    assert adam.met
    assert "Missed or not run: broken." in gpu.page(found, "a device")
    assert [line.value for line in lines(gpu.measure(bench, limit_s=0.0))] == ["left out, no time"] * 2


def test_the_demo_is_that_of_the_makefile() -> None:
    flags = " ".join(("--num-steps", str(_gpu_checks.WHOLE), *_gpu_checks.DEMO))
    assert f"DEMO_FLAGS ?= {flags}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize(("last", "mismatch", "missed"), [(0.97, 0.01, 0), (0.5, 0.01, 1), (0.97, 0.3, 1), (0.97, math.nan, 1)])
def test_the_demo_is_held_to_its_bounds(last: float, mismatch: float, missed: int) -> None:
    metrics = [{"reward/mean": 0.5 if step < 40 else last, "mismatch/mean": mismatch, "time/step_s": 0.4} for step in range(60)]
    found = list(_gpu_checks.judged("vllm", metrics, 60.0))
    assert sum(not line.met for line in found) == missed
    assert found[-1].value == "0.40 s, median"
    assert all(line.met for line in _gpu_checks.judged("vllm", [{"reward/mean": 0.1, "mismatch/mean": 0.0}], 1.0))  # too short to be judged


def test_an_engine_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [line.value for line in _gpu_checks.demo("vllm", 1, torch.device("cpu"))] == ["left out: vLLM is not installed"]


def test_findings_that_are_wrong_have_missed_their_target() -> None:
    report = {
        "findings": [
            {"part": "limits", "name": "open files", "level": "wrong", "found": "256", "remedy": "ulimit -n 4096"},
            {"part": "limits", "name": "memory", "level": "good", "found": "lots", "remedy": ""},
        ]
    }
    assert [(line.name, line.value, line.target, line.met) for line in _gpu_checks.findings(report)] == [
        ("limits: open files", "256 (ulimit -n 4096)", "wrong", False),
        ("limits: memory", "lots", "good", True),
    ]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_whole_doctor_and_the_demo_with_vllm_are_parts() -> None:
    bench = gpu.Bench(replace(TINY, trials=True, engines=("vllm",), demo_steps=2), torch.device("cpu"))
    pieces = bench.pieces()
    bench.pieces = lambda: {name: pieces[name] for name in ("doctor", "demo_vllm")}  # type: ignore[method-assign]
    found = gpu.measure(bench)
    assert not [line for line in lines(found) if not line.met]
    assert bench.matmul_rate == bench.examined["rates"]["matmul_bfloat16"] > 0
    assert [line.name for line in found["demo_vllm"]][:2] == ["vllm: engine and learner, mean difference", "vllm: reward of the calculator"]


@pytest.mark.slow
def test_neither_ray_nor_vllm_is_needed() -> None:
    blocked = "import sys; sys.modules.update(ray=None, vllm=None)"
    code = f"{blocked}; import tests.benchmarks.gpu; from agentrl.cli.main import main; sys.exit(main(['doctor', '--no-trials']))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "limits" in ran.stdout


def test_where_there_is_no_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main() == 0
    assert "no GPU" in capsys.readouterr().out
