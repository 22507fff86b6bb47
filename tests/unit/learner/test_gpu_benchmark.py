"""Everything that `make gpu` measures runs, with sizes so small that a CPU does it in seconds; the figures mean nothing here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.benchmarks import gpu

TINY = gpu.Sizes(
    model={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    | {"vocab_size": 1024, "tie_word_embeddings": True},
    tokens=64,
    rows=4,
    peaks=(64, 128),
    prompts=((24, 8), (8, 24)),
    members=3,
    matmul=64,
    adam=1000,
    repeats=1,
    attention=(2, 12, 4, 2),
    buckets=(3, 4096),
    train_steps=1,
)


@pytest.mark.filterwarnings("ignore")
def test_every_measurement_runs_and_is_a_line_of_the_table() -> None:
    before = torch.distributed.is_initialized()  # by another test of this process
    found = gpu.measure(gpu.Bench(TINY, torch.device("cpu")))
    assert torch.distributed.is_initialized() == before
    assert not [line for line in found if "failed" in line.value or "left out" in line.value or "WRONG" in line.value]
    names = [line.name for line in found]
    assert names == [
        "matmul 64, bfloat16",
        "attention with 4 heads on 2",
        "attention with 4 heads on 2, window 4",
        "plain loop, transformers with sdpa",
        "plain loop, the same with varlen",
        "learner",
        "learner over the best plain loop",
        "peak memory at 64 tokens",
        "peak memory at 128 tokens",
        "engine and learner, mean difference",
        "reward of the calculator",
        "3 buckets of 4,096 bytes to another process",
        "prompt of 24, 3 answers of 8",
        "prompt of 8, 3 answers of 24",
        "offloaded Adam, 1e9 parameters",
    ]
    report = gpu.table(found, "a device")
    assert report.startswith("`make gpu`, a device, torch ")
    assert all(f"| {name} | " in report for name in names)


def test_a_measurement_that_fails_does_not_stop_the_others() -> None:
    bench = gpu.Bench(TINY, torch.device("cpu"))

    def broken() -> Any:
        raise RuntimeError("no kernel\nand more")

    bench.pieces = lambda: [broken, bench.adam]  # type: ignore[method-assign]
    failed, adam = gpu.measure(bench)
    assert (failed.value, failed.met) == ("failed: RuntimeError: no kernel", False)
    assert adam.met
    assert [line.value for line in gpu.measure(bench, limit_s=0.0)] == ["left out, no time"] * 2


def test_where_there_is_no_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main() == 0
    assert "no GPU" in capsys.readouterr().out
