"""Several rollout workers that share one engine, on Ray: the same run as with one, bit for bit where it is synchronous."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import ENVS, SMALL, Run, succeeded, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run_with(folder: Path, workers: int, *words: str) -> Run:
    flags = ("--runtime", "ray", "--rollout-workers-per-engine", str(workers), "--record", "all", "--seed", "3", *SMALL, *words)
    return succeeded(train(folder / f"{workers}", *flags, agent=ENVS / "calculator.py"))


def sampled(run: Run) -> dict[str, list[list[int]]]:
    records = [json.loads(line) for line in (run.directory / "trajectories.jsonl").read_text().splitlines()]
    return {record["trajectory_id"]: [turn["token_ids"] for turn in record["turns"]] for record in records}


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_synchronous_run_is_the_same_whoever_plays_the_episodes(tmp_path: Path, engine: str) -> None:
    one, three = (run_with(tmp_path, workers, "--engine", engine, "--num-steps", "3") for workers in (1, 3))
    assert sampled(one) == sampled(three)
    assert len(sampled(one)) == 3 * 16
    names = ("loss/policy", "grad_norm", "reward/mean", "tokens", "group/count")
    assert [[row[name] for name in names] for row in one.metrics] == [[row[name] for name in names] for row in three.metrics]
    weights = [(run.directory / "model" / "model.safetensors").read_bytes() for run in (one, three)]
    assert weights[0] == weights[1]


def test_an_asynchronous_run_labels_every_token_with_its_version(tmp_path: Path) -> None:
    run = run_with(tmp_path, 2, "--engine", "vllm", "--async", "--num-steps", "6", "--num-engines", "2")
    measured = [row["mismatch/max"] for row in run.metrics if row["mismatch/max"] is not None]  # steps with tokens of the newest weights
    assert measured
    assert max(measured) < 1e-4  # the log-probabilities are those of the weights of the label
    assert max(row["staleness/max"] for row in run.metrics) <= 1
    assert run.metrics[-1]["engine/live"] == 2
    assert run.summary["ledger"]["in_flight"] == 0
    assert any(row.get("engine/concurrency", 0.0) > 0 for row in run.metrics)  # a step in which nothing was sampled has none
