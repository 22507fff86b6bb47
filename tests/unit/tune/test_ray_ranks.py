"""Ranks on a Ray cluster, without one: what is sent, what a process is told, what is passed on. `tests/e2e/test_tune_ray.py` has Ray."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config.methods import METHODS
from agentrl.core.errors import ConfigError, LearnerDeadError
from agentrl.resolve.ranks import LAUNCHER, holds_directory, is_first, is_rank, is_started
from agentrl.resolve.tune import TunePlan, load_given
from agentrl.tune import ray_ranks
from agentrl.tune.follow import Stop
from agentrl.tune.ray_ranks import ClusterRank, environment, shared_paths

DATA = Path(__file__).parents[3] / "examples" / "tune"
PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", LAUNCHER)


def plan_of(command: str = "sft", data: str = "chats", **settings: Any) -> TunePlan:
    return load_given(METHODS[command], {"data": str(DATA / f"{data}.jsonl"), "run_dir": "runs/a", **settings})


@pytest.fixture
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PLACES:
        monkeypatch.setenv(name, "x")  # so that what a test sets is taken back
        monkeypatch.delenv(name)


def test_a_run_is_on_ray_where_it_is_asked_for_or_an_address_is_given() -> None:
    assert [plan_of(**given).on_ray for given in ({}, {"runtime": "ray"}, {"ray_address": "auto"})] == [False, True, True]
    with pytest.raises(ConfigError, match=r"--ray-address = '10.0.0.1:6379': has no effect with --runtime local"):
        plan_of(runtime="local", ray_address="10.0.0.1:6379")


@pytest.mark.parametrize("given", [{"runtime": "ray"}, {"ray_address": "auto"}])
def test_ranks_of_torchrun_are_placed_already(given: dict[str, str], no_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun or srun has started here already"):
        plan_of(**given)


@pytest.mark.parametrize("command", METHODS)
def test_every_plan_can_be_sent(command: str) -> None:
    data = {"sft": "chats", "distill": "chats", "kto": "labelled", "process-reward-model": "steps"}.get(command, "pairs")
    plan = plan_of(command, data, **({"teacher": "some/teacher"} if command == "distill" else {}))
    assert pickle.loads(pickle.dumps(plan)).to_json() == plan.to_json()


def test_a_rank_has_the_threads_of_a_local_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert environment(plan_of(num_ranks=2))["OMP_NUM_THREADS"] == "1"
    assert environment(plan_of())["OMP_NUM_THREADS"] == str(os.cpu_count())
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = environment(plan_of(num_ranks=2))
    assert (found["OMP_NUM_THREADS"], found["CUDA_VISIBLE_DEVICES"], found["DS_ACCELERATOR"]) == ("3", "", "cpu")


def test_paths_that_all_machines_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "other").mkdir()
    plan = load_given(
        METHODS["dpo"], {"data": "rows.jsonl", "eval_data": str(DATA / "pairs.jsonl"), "reference": "other", "run_dir": "run"}
    )
    found = [(name, path) for name, _, path in shared_paths(plan)]
    assert found[0] == ("--ray-address", str(tmp_path))  # the run's directory is not there yet
    assert ("--reference", str(tmp_path / "other")) in found
    assert found[-2:] == [("--data", str(tmp_path / "rows.jsonl")), ("--data", str(DATA / "pairs.jsonl"))]
    (tmp_path / "run").mkdir()
    assert shared_paths(plan)[0] == ("--run-dir", str(tmp_path / "run"), str(tmp_path / "run"))


def test_a_rank_knows_its_place_and_its_output_is_taken(tmp_path: Path, no_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(sys, "argv", ["other"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    rank = ClusterRank(print, plan_of(), ["agentrl", "sft"], str(tmp_path / "mine"), "10.0.0.2")
    assert not is_started()
    rank.start(3, 4, 777, "10.0.0.1", (1, 2))
    assert [os.environ[name] for name in PLACES] == ["3", "4", "1", "2", "10.0.0.1", "777", ""]
    assert (Path.cwd(), sys.argv) == (tmp_path / "mine", ["agentrl", "sft"])
    assert is_started()
    assert is_rank()
    assert not is_first()
    rank.start(0, 1, 777, "10.0.0.1", (0, 1))
    assert is_started()  # alone, it starts no other
    assert is_first()
    assert not holds_directory()
    sys.stdout.write("one\n")
    sys.stderr.write("two\n")
    assert (rank.said(), rank.said()) == ("one\ntwo\n", "")
    rank.ask_stop()
    assert rank._stop.asked


class Ranks:
    """Two ranks, which end when both were asked to, or fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.asked, self.lines = error, 0, ["begun\n"]
        self.actors = [SimpleNamespace(call_beside=SimpleNamespace(remote=self.beside))] * 2

    def beside(self, method: str) -> Any:
        self.asked += method == "ask_stop"
        said = "".join(self.lines) if method == "said" else ""
        self.lines.clear()
        return asyncio.sleep(0, said) if method == "said" else None

    async def every(self, method: str) -> None:
        assert method == "run"
        while self.asked < 2:
            await asyncio.sleep(0.01)
            if self.error is not None:
                raise self.error
        self.lines.append("ended\n")


def test_a_request_to_stop_goes_to_all_ranks_once_and_the_last_lines_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_ranks, "POLL_S", 0.02)
    stop, ranks = Stop(), Ranks()
    stop.asked = True
    asyncio.run(ray_ranks._followed(ranks, stop))
    assert ranks.asked == 2
    assert capsys.readouterr().out == "begun\nended\n"


def test_the_error_of_a_rank_ends_the_run() -> None:
    with pytest.raises(LearnerDeadError, match="learner-1 is gone"):
        asyncio.run(ray_ranks._followed(Ranks(LearnerDeadError("learner-1 is gone")), Stop()))
