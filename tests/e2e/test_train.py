"""The whole loop on real vLLM, DeepSpeed and Ray, through the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import ENVS, SMALL, Run, succeeded, train

pytestmark = pytest.mark.timeout(400)

PROMISED = (
    "step",
    "time_s",
    "reward/mean",
    "score/mean",
    "staleness/mean",
    "staleness/max",
    "mismatch/max",
    "tokens_per_s",
    "idle/generator",
    "idle/learner",
    "ledger/submitted",
    "ledger/trained",
    "ledger/filtered",
    "ledger/dropped",
    "ledger/in_flight",
)
ON_LOOP = """
import asyncio
from dataclasses import replace

from agentrl.assets.envs.calculator import Calculator


class OnLoop(Calculator):
    async def step(self, state):
        result, loop = super().step(state), type(asyncio.get_running_loop())
        return replace(result, info={**(result.info or {}), "loop_of_asyncio": float(loop.__module__.startswith("asyncio."))})
"""
TIMED = ("time", "idle", "tokens_per_s", "publish", "seconds", "_s", "queue", "kv_usage", "waiting", "concurrency", "rss", "peak")


def balanced(row: dict[str, Any]) -> bool:
    parts = ("trained", "filtered", "dropped", "in_flight")
    return bool(row["ledger/submitted"] == sum(row[f"ledger/{part}"] for part in parts))


def untimed(run: Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not any(word in k for word in TIMED)} for row in run.metrics]


@pytest.fixture(scope="module")
def sync_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    arguments = ("--runtime", "local", "--num-steps", "4", *SMALL)
    return succeeded(train(tmp_path_factory.mktemp("sync") / "run", *arguments, fork=False))


@pytest.fixture(scope="module")
def async_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    arguments, folder = ("--async", "--num-steps", "6", *SMALL), tmp_path_factory.mktemp("async")
    (folder / "on_loop.py").write_text(ON_LOOP)
    return succeeded(train(folder / "run", *arguments, agent=folder / "on_loop.py"))


def test_run_directory_holds_what_is_promised(sync_run: Run) -> None:
    for name in ("config.json", "metrics.jsonl", "trajectories.jsonl", "summary.json", "tensorboard", "model/config.json"):
        assert (sync_run.directory / name).exists(), name
    config = json.loads((sync_run.directory / "config.json").read_text())
    assert config["flow"]["max_staleness"] == 0
    assert len(sync_run.metrics) == 4
    for row in sync_run.metrics:
        assert all(math.isfinite(row[name]) for name in PROMISED)
        assert balanced(row)


def test_engine_and_learner_agree_in_float32(sync_run: Run) -> None:
    assert 0 < max(row["mismatch/max"] for row in sync_run.metrics) <= 1e-4


def test_synchronous_run_is_never_stale(sync_run: Run) -> None:
    assert {row["staleness/max"] for row in sync_run.metrics} == {0}


def test_same_seed_same_metrics(sync_run: Run, tmp_path: Path) -> None:
    """Also when the one process was started for it and the other was forked."""
    again = succeeded(train(tmp_path / "run", "--runtime", "local", "--num-steps", "4", *SMALL))
    assert untimed(again) == untimed(sync_run)
    assert len(untimed(again)[0]) > 20
    other = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    assert other == (sync_run.directory / "model" / "model.safetensors").read_bytes()


def test_asynchronous_run_on_ray(async_run: Run) -> None:
    assert len(async_run.metrics) == 6
    assert all(balanced(row) for row in async_run.metrics)
    assert max(row["staleness/max"] for row in async_run.metrics) <= 1
    assert async_run.metrics[-1]["ledger/in_flight"] == 0
    assert async_run.summary["ledger"]["trained"] == 24


def test_episodes_have_the_loop_of_asyncio_on_ray_too(async_run: Run) -> None:
    """Another one takes ten times as long to start a program in a process of much memory."""
    assert {row["env/loop_of_asyncio"] for row in async_run.metrics} == {1.0}


def test_trajectories_can_be_read(async_run: Run) -> None:
    records = [json.loads(line) for line in (async_run.directory / "trajectories.jsonl").read_text().splitlines()]
    assert len(records) >= 24
    turns = records[0]["turns"]
    assert len(turns[0]["token_ids"]) == len(turns[0]["logprobs"]) == len(turns[0]["versions"]) > 0


@pytest.mark.parametrize(
    ("staleness", "runtime"),
    [(1, "local"), pytest.param(2, "ray", marks=pytest.mark.slow), pytest.param(3, "local", marks=pytest.mark.slow)],
)
def test_no_trained_token_is_older_than_the_bound(tmp_path: Path, staleness: int, runtime: str) -> None:
    arguments = ("--max-staleness", str(staleness), "--runtime", runtime, "--num-steps", "12", *SMALL)
    run = succeeded(train(tmp_path / "run", *arguments, agent=ENVS / "guess_number.py"))
    assert max(row["staleness/max"] for row in run.metrics) <= staleness
    assert all(balanced(row) for row in run.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_two_engines_and_two_ranks(tmp_path: Path, zero: int) -> None:
    arguments = ("--async", "--num-engines", "2", "--num-learners", "2", "--zero-stage", str(zero), "--num-steps", "3", *SMALL)
    run = succeeded(train(tmp_path / "run", *arguments, agent=ENVS / "calculator.py", timeout_s=390))
    assert len(run.metrics) == 3
    measured = [row["mismatch/max"] for row in run.metrics if row["mismatch/max"] is not None]
    assert measured
    assert max(measured) <= 1e-4


def test_dry_run_prints_the_resolved_configuration(capfd: pytest.CaptureFixture[str]) -> None:
    from agentrl.cli.main import main

    assert main(["train", "--agent", str(ENVS / "arithmetic.py"), "--async", "--dry-run"]) == 0
    assert json.loads(capfd.readouterr().out)["flow"]["max_staleness"] == 1
