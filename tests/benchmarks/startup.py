"""From the command to the first finished step, tiny model: ``python -m tests.benchmarks.startup [repetitions]``."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.e2e.runs import ENVS, ROOT, SMALL, command

TARGETS_S = {"local": 18.0, "ray": 30.0}


def first_step(runtime: str) -> tuple[float, float]:
    """Seconds until the first line of metrics, and peak memory of the whole family of processes, GiB."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = command(
            "train", "--agent", str(ENVS / "arithmetic.py"), "--runtime", runtime, "--num-steps", "1", "--run-dir", str(run), *SMALL
        )
        begin = time.perf_counter()
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        peak, seconds, metrics = 0, 0.0, run / "metrics.jsonl"
        while process.poll() is None:
            peak = max(peak, family_memory(process.pid))
            if not seconds and metrics.exists() and metrics.stat().st_size:
                seconds = time.perf_counter() - begin
            time.sleep(0.05)
        if process.returncode or not seconds:
            raise RuntimeError(f"the run ended with {process.returncode}, first step after {seconds} s")
        return seconds, peak / 2**30


def family_memory(pid: int) -> int:
    """Proportional set size of a process and its descendants, bytes; shared pages count once."""
    total = 0
    try:
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
    except psutil.NoSuchProcess:
        return total
    return total


def main(repetitions: int = 3) -> None:
    print("| runtime | first step, s (min / median / max) | target, s | peak memory, GiB |\n|---|---|---|---|")
    for runtime, target in TARGETS_S.items():
        seconds, memory = zip(*(first_step(runtime) for _ in range(repetitions)), strict=True)
        ordered = sorted(seconds)
        print(
            f"| {runtime} | {ordered[0]:.1f} / {ordered[len(ordered) // 2]:.1f} / {ordered[-1]:.1f} | {target:.0f} | {max(memory):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
