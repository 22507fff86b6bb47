"""A user's plain script, whose environments are in `__main__`: python api_script.py SCENARIO FOLDER."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

import agentrl

SMALL: dict[str, Any] = {
    "num_steps": 2,
    "groups_per_step": 2,
    "n_samples_per_prompt": 2,
    "max_new_tokens": 8,
    "tensorboard": False,
    "record": "all",
}
WORDS = ("yes", "no", "up", "down")


class Echo(agentrl.AgentInstance):
    """Say the word."""

    @classmethod
    def tasks(cls) -> list[agentrl.Task]:
        return [agentrl.Task(f"Say {word}.", label=word) for word in WORDS]

    def step(self, state: agentrl.StepState, /) -> agentrl.StepResult:
        return agentrl.StepResult(len(state.action_text) % 7 / 7, terminated=True, score=float(state.label in state.action_text))


class Broken(Echo):
    """Fails always."""

    def step(self, state: agentrl.StepState, /) -> agentrl.StepResult:
        raise ValueError("broken on purpose")


def nothing_is_left() -> None:
    """Neither processes nor threads of a run; tqdm of a library keeps one of its own."""
    assert not psutil.Process().children(recursive=True)
    assert {thread.name for thread in threading.enumerate()} <= {"MainThread", "tqdm_monitor"}, threading.enumerate()


def rewards(run: agentrl.Run) -> list[float]:
    assert run.status == "finished"
    assert run.model_path == run.path / "model"
    assert len(list(run.episodes())) == 8
    assert "class Echo" in (run.path / "environment.py").read_text()
    return [row["reward/mean"] for row in run.metrics]


def again_and_again(folder: Path, runtime: str) -> None:
    """The same training twice: from the script, and inside a running event loop in both forms."""

    async def inside() -> list[agentrl.Run]:
        ticks: list[int] = []

        async def tick() -> None:
            while True:
                await asyncio.sleep(0.01)
                ticks.append(1)

        ticking = asyncio.create_task(tick())
        second = await agentrl.train_async(Echo, runtime=runtime, run_dir=folder / "second", **SMALL)
        assert len(ticks) > 20, "the caller's loop stood still"
        ticking.cancel()
        if runtime == "ray":
            return [second]
        return [second, agentrl.train(Echo, runtime=runtime, run_dir=folder / "third", **SMALL)]

    first = agentrl.train(Echo, runtime=runtime, run_dir=folder / "first", **SMALL)
    nothing_is_left()
    for run in asyncio.run(inside()):
        assert rewards(run) == rewards(first)
    nothing_is_left()


def local(folder: Path) -> None:
    again_and_again(folder, "local")
    with pytest.raises(agentrl.AgentRLError, match="broken on purpose"):
        agentrl.train(Broken, runtime="local", run_dir=folder / "broken", max_failure_rate=0.1, **SMALL)
    assert agentrl.load_run(folder / "broken").status == "failed"
    nothing_is_left()
    isolated = agentrl.train(Echo, runtime="local", env_isolation="process", run_dir=folder / "isolated", **SMALL)
    assert rewards(isolated) == rewards(agentrl.load_run(folder / "first"))
    result = agentrl.evaluate(Echo, run=isolated, eval_samples=2, output=folder / "eval")
    assert result.assessment.overall["reward"].low is not None
    assert result.metrics["tasks"] == len(WORDS)
    report = asyncio.run(agentrl.check_async(Echo, episodes=2, budget_s=20))
    assert report.ok, report
    assert not agentrl.check(Broken, episodes=2, budget_s=20).ok
    nothing_is_left()


def ray(folder: Path) -> None:
    again_and_again(folder, "ray")


def ray_imported_before(folder: Path) -> None:
    """A cell of a notebook imports Ray, or vLLM, which does, before a run begins; the cluster is as private as without."""
    import ray as imported

    listening: set[str] = set()

    class Watch(agentrl.Callback):
        def on_step_end(self, event: agentrl.StepEnd) -> None:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    found = process.net_connections(kind="inet")
                    listening.update(connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN)
            assert os.environ["RAY_AUTH_MODE"] == "token"

    run = agentrl.train(Echo, runtime="ray", run_dir=folder / "run", callback=[Watch()], **SMALL)
    assert len(rewards(run)) == 2
    assert listening, "no process of the cluster was seen"
    assert all(ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback for address in listening), listening
    assert not psutil.Process().children(recursive=True)
    imported.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", _temp_dir=tempfile.mkdtemp(prefix="ray-"))
    with pytest.raises(agentrl.ConfigError, match=r"connected to a Ray cluster already. Call ray.shutdown\(\) before"):
        agentrl.train(Echo, runtime="ray", run_dir=folder / "other", **SMALL)
    assert imported.is_initialized(), "a run must leave a cluster of the user alone"
    imported.shutdown()


def interrupted(folder: Path) -> None:
    """Is interrupted by the test, saves, and goes on."""
    settings = {**SMALL, "num_steps": 1000}
    with pytest.raises(KeyboardInterrupt):
        agentrl.train(Echo, runtime="local", run_dir=folder / "run", **settings)
    run = agentrl.load_run(folder / "run")
    done = len(run.metrics)
    assert (run.status, done > 0) == ("interrupted", True)
    nothing_is_left()
    assert len(agentrl.train(Echo, resume=run.path, num_steps=done + 1).metrics) == done + 1


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
    sys.stdout.write("done\n")
