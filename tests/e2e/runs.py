"""Start the command line as a user would, and read back what it left."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.e2e import forked

ROOT = Path(__file__).parents[2]
ENVS = ROOT / "envs"

SMALL = ("--groups-per-step", "4", "--n-samples-per-prompt", "4", "--max-new-tokens", "24")


@dataclass(frozen=True)
class Run:
    """A finished run: exit code, output, and its directory."""

    code: int
    output: str
    directory: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    @property
    def summary(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return data


CHOOSE = ("--engine", "--resume", "--config")
"""Flags with which a run's engine is decided already; not by ``--resume auto``, which begins a run where there is none."""


def on_vllm(args: tuple[str, ...]) -> tuple[str, ...]:
    """Have a training run sample with vLLM, as on a cluster, where it would choose another engine for the bundled model by itself."""
    begins = "--resume=auto" in args or ("--resume", "auto") in pairwise(args)
    chosen = {word.partition("=")[0] for word in args}.intersection(CHOOSE)
    decided = bool(chosen - {"--resume"} if begins else chosen) or importlib.util.find_spec("vllm") is None
    return args if decided or args[:1] != ("train",) or "--help" in args else (*args, "--engine", "vllm")


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "agentrl", *on_vllm(args)]


def start(*args: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start in a process group of its own, so that whatever it leaves behind can be found and ended."""
    return subprocess.Popen(
        command(*args),
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def train(
    directory: Path,
    *args: str,
    agent: str | Path = ENVS / "arithmetic.py",
    timeout_s: float = 240,
    env: dict[str, str] | None = None,
    fork: bool = True,
) -> Run:
    """Run ``agentrl train`` to its end; with `fork`, a run without Ray is forked from a process that has the libraries loaded."""
    words = ("train", "--agent", str(agent), "--run-dir", str(directory), *args)
    if fork and "local" in args:
        words += () if "--skip-checks" in args or "--resume" in args else ("--skip-checks", "env")  # saves the start of a process
        code, output = forked.run(on_vllm(words), env or {}, timeout_s)
        assert code is not None, f"no end after {timeout_s} s:\n{output}"
        return Run(code, output, directory)
    process = start(*words, env=env)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"no end after {timeout_s} s:\n{output}") from None
    return Run(process.returncode, output, directory)


def succeeded(run: Run) -> Run:
    """The run, once it is sure that it ended well."""
    assert run.code == 0, run.output
    return run
