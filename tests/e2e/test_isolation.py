"""An environment that harms its process in 5 % of its steps: the run goes on, nothing else differs, nothing survives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.runs import Run, succeeded, train
from tests.processes import still_runs

MARK = "AGENTRL_TEST_ISOLATION"

ENV = """
import hashlib, os, random, re, time
import numpy as np
from agentrl import AgentInstance, StepResult, Task

HARM = {harm}
KINDS = ("hang", "exit", "allocate", "fork", "reseed")
kept = []

def chosen(state):
    '''What goes wrong in this step, if anything: decided by task, turn and action, so that a repetition decides alike.'''
    parts = (state.task.seed, state.turn, state.action_text)
    number = int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big")
    return KINDS[number // 20 % len(KINDS)] if number % 20 == 0 else ""

class Harmful(AgentInstance):
    @classmethod
    def tasks(cls):
        return [Task(f"What is {{a}}+{{b}}?", label=a + b, id=f"{{a}}+{{b}}", seed=10 * a + b) for a in range(10) for b in range(10)]

    def step(self, state):
        kind = chosen(state)
        draw = random.random() + np.random.rand()
        if HARM and kind:
            getattr(self, kind)()
        numbers = re.findall(r"-?\\d+", state.action_text)
        right = bool(numbers) and numbers[-1] == str(state.label)
        info = {{"draw": draw, "harm": float(bool(kind)), "path": float("PATH" in os.environ)}}
        return StepResult(float(right), f"Again: what is {{state.label}}+0?", terminated=state.turn == 1, info=info)

    def hang(self):
        time.sleep(1000)

    def exit(self):
        os._exit(7)

    def allocate(self):
        while True:
            kept.append(bytearray(2**24))

    def fork(self):
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.setsid()
                    time.sleep(1000)
                os._exit(0)
        os._exit(8)

    def reseed(self):
        random.seed(0)
        np.random.seed(0)
        os.environ.clear()
        os.chdir("/")
        kept.append("state of the module")
"""

FLAGS = ("--num-steps", "12", "--groups-per-step", "4", "--n-samples-per-prompt", "4", "--max-new-tokens", "12", "--max-turns", "2")
QUIET = ("--learning-rate", "1e-30", "--record", "all", "--max-failure-rate", "0.9", "--no-save-model", "--no-tensorboard")
ISOLATED = ("--env-isolation", "process", "--env-limits", "memory_mib=300", "--step-timeout-s", "3")


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_harm_stays_in_its_own_episode(tmp_path: Path, runtime: str) -> None:
    runs = {}
    for harm in (False, True):
        path = tmp_path / f"harm_{harm}.py"
        path.write_text(ENV.format(harm=harm))
        mark = f"{tmp_path}-{harm}"
        runs[harm] = succeeded(
            train(tmp_path / str(harm), *FLAGS, *QUIET, *ISOLATED, "--runtime", runtime, agent=path, timeout_s=280, env={MARK: mark})
        )
        assert marked(mark) == []
    clean, harmed = (played(runs[harm]) for harm in (False, True))
    assert_balanced(runs[True])
    doomed = {key for key, episode in clean.items() if episode["metrics"].get("harm")}
    failed = {key for key, episode in harmed.items() if episode["status"] in ("env_error", "timeout")}
    errors = " ".join(str(episode["error"]) for episode in harmed.values())
    assert failed
    assert failed <= doomed | (harmed.keys() - clean.keys())
    assert all(sign in errors for sign in ("did not return within 3 s", "exited with code 7", "exited with code 8"))
    common = (clean.keys() & harmed.keys()) - failed
    assert len(common) > 100
    for key in common - doomed:
        assert likeness(clean[key]) == likeness(harmed[key]), key
    figures = {"episodes": len(harmed), "failed": len(failed), "compared": len(common - doomed)}
    (tmp_path / "figures.json").write_text(json.dumps(figures))


def played(run: Run) -> dict[tuple[str, int, int], dict[str, Any]]:
    """First attempts by task, epoch and place in the group."""
    lines = (run.directory / "trajectories.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {
        (record["task"]["id"], record["task"]["epoch"], int(record["trajectory_id"].rsplit("-", 1)[1])): record
        for record in records
        if record["attempt"] == 0
    }


def likeness(record: Mapping[str, Any]) -> Any:
    """What must not depend on other episodes; log-probabilities depend on what else the engine computes, in the last digits."""
    turns = [[turn["prompt_ids"], turn["token_ids"], turn["reward"]] for turn in record["turns"]]
    return record["status"], record["reward"], record["score"], record["metrics"], turns


def assert_balanced(run: Run) -> None:
    ledger = {name.removeprefix("ledger/"): value for name, value in run.summary["ledger"].items()}
    dropped = sum(value for name, value in ledger.items() if name.startswith("dropped"))
    assert ledger["submitted"] == ledger["trained"] + ledger.get("filtered", 0) + dropped + ledger["in_flight"], ledger
    assert ledger["trained"] == 12 * 4


def marked(mark: str) -> list[psutil.Process]:
    """Processes that inherited the run's mark and still run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and still_runs(process):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found
