"""Parts of ``make gpu`` that are commands of agentrl: the examination of the machine, and the demo with an engine."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentrl.track.text import sparkline

DOCTOR_LIMIT_S, DEMO_LIMIT_S = 200.0, 150.0
MISMATCH, REWARD = 0.1, 0.9
"""Targets of the demo: mean difference between the log-probabilities of engine and learner, nats, and mean reward of its last ten steps."""
DEMO, WHOLE = ("--learning-rate", "3e-4", "--max-new-tokens", "32"), 60
"""Flags of ``make demo`` beside its steps, and those steps; the reward of fewer is not judged."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """One line of a table."""

    name: str
    value: str
    target: str = ""
    met: bool = True


def doctor(device: torch.device, *, trials: bool = True, limit_s: float = DOCTOR_LIMIT_S) -> Mapping[str, Any]:
    """Return the report of ``agentrl doctor`` about this machine."""
    words = [sys.executable, "-m", "agentrl", "doctor", "--json", "--device", device.type, *([] if trials else ["--no-trials"])]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=limit_s, check=False)
    if not ran.stdout.startswith("{"):
        raise RuntimeError(_last(ran))
    report: Mapping[str, Any] = json.loads(ran.stdout)
    return report


def findings(report: Mapping[str, Any]) -> Iterator[Found]:
    """Return the findings of `doctor` as lines; those that are wrong have missed their target."""
    for finding in report["findings"]:
        level, remedy = finding["level"], finding["remedy"]
        value = finding["found"] + (f" ({remedy})" if remedy else "")
        yield Found(name=f"{finding['part']}: {finding['name']}", value=value, target=level, met=level != "wrong")


def demo(engine: str, steps: int, device: torch.device, *, limit_s: float = DEMO_LIMIT_S) -> Iterator[Found]:
    """Run ``make demo`` with an engine: it agrees with the learner, and the reward of a `WHOLE` run comes close to 1.

    With the engine of transformers everything is in one process. With vLLM it is the very command, asynchronous on Ray, where Ray is
    installed.
    """
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        yield Found(name="vllm", value="left out: vLLM is not installed")
        return
    apart = engine == "vllm" and importlib.util.find_spec("ray") is not None
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--agent", "envs/calculator.py", *DEMO, "--num-steps", str(steps), "--engine", engine, "--run-dir", f"{folder}/run"]
        flags += ["--device", device.type, *(["--async"] if apart else ["--runtime", "local"])]
        words = [sys.executable, "-m", "agentrl", "train", *flags]
        began = time.perf_counter()
        ran = subprocess.run(words, capture_output=True, text=True, timeout=limit_s, check=False)
        took = time.perf_counter() - began
        file = Path(folder, "run", "metrics.jsonl")
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    if ran.returncode or not lines:
        raise RuntimeError(_last(ran))
    yield from judged(engine, lines, took)


def judged(engine: str, lines: Sequence[Mapping[str, float]], took: float) -> Iterator[Found]:
    """Return what the metrics of a demo say."""
    rewards = [line["reward/mean"] for line in lines]
    gaps = [line["mismatch/mean"] for line in lines if "mismatch/mean" in line]
    agree = bool(gaps) and all(gap <= MISMATCH for gap in gaps)
    value = f"{max(gaps, default=float('nan')):.2e} nats"
    yield Found(name=f"{engine}: engine and learner, mean difference", value=value, target=f"<= {MISMATCH}", met=agree)
    before, after = statistics.fmean(rewards[:5]), statistics.fmean(rewards[-10:])
    value = f"{before:.2f} to {after:.2f} in {len(lines)} steps, {took:.0f} s {sparkline(rewards, 30)}"
    yield Found(name=f"{engine}: reward of the calculator", value=value, target=f">= {REWARD}", met=after >= REWARD or len(lines) < WHOLE)
    seconds = [line["time/step_s"] for line in lines[1:] if "time/step_s" in line]
    if seconds:
        yield Found(name=f"{engine}: time of a step", value=f"{statistics.median(seconds):.2f} s, median")


def _last(ran: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a command wrote."""
    return next((line for text in (ran.stderr, ran.stdout) for line in reversed(text.splitlines()) if line.strip()), "no output")
