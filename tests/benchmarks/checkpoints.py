"""Checkpoints: gigabytes hashed per second, and the time of a step while a checkpoint is copied to a slow file system.

    python -m tests.benchmarks.checkpoints [--gib N] [--blocks N] [--pairs N] [--steps N] [--mb-per-s X]

The hash is that of one file in shared memory: as one SHA-256 on one thread, and as the manifest has it, in parts on as many threads as
there are cores, up to 8. Learner steps are those of one rank with the bundled model, policy, critic and reference, in blocks: in every
second one a checkpoint is copied all the while to a folder that takes so many megabytes per second. Steps of runs are those of two
runs one after the other, in alternating order, both with a checkpoint after every fourth step; one copies them to such a folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from agentrl.core.manifest import MAX_THREADS, flush_files
from agentrl.core.operating_system import memory_root
from tests.e2e.runs import ENVS, ROOT

RATE = "AGENTRL_BENCHMARK_MB_PER_S"
BLOCK = 2**18
SAVE_EVERY = 4
STEPS_PER_BLOCK = 5
WARM = 4
"""Steps at the beginning that are left out."""


class ThrottledFileSystem(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A folder, ``throttled:///path``, that takes so many megabytes per second."""

    protocol = ("throttled",)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        text: str = LocalFileSystem._strip_protocol(str(path).removeprefix("throttled://"))
        return text

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        """Copy block by block, each in its time."""
        pause_s = BLOCK / 1e6 / float(os.environ[RATE])
        Path(rpath).parent.mkdir(parents=True, exist_ok=True)
        with Path(lpath).open("rb") as source, Path(rpath).open("wb") as target:
            while block := source.read(BLOCK):
                target.write(block)
                time.sleep(pause_s)


def child(words: list[str]) -> int:
    """Train in this process, in which the slow file system is known."""
    from agentrl.cli.main import main as command

    fsspec.register_implementation("throttled", ThrottledFileSystem, clobber=True)
    return command(words)


def timed(work: Callable[[], Any], size: float) -> tuple[float, float]:
    """Gigabytes per second, and per second of CPU time, the best of three; on a busy machine only the second says something."""
    wall = cpu = 0.0
    for _ in range(3):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        work()
        wall = max(wall, size / 1e9 / (time.perf_counter() - begin))
        cpu = max(cpu, size / 1e9 / (time.process_time() - begin_cpu))
    return wall, cpu


def hash_rates(gib: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """Rates of one thread and of the manifest's threads."""
    with tempfile.TemporaryDirectory(dir=memory_root()) as folder:
        file, block = Path(folder, "file"), os.urandom(2**24)
        with file.open("wb") as out:
            for _ in range(round(gib * 64)):
                out.write(block)
        size = file.stat().st_size

        def one() -> str:
            with file.open("rb") as content:
                return hashlib.file_digest(content, "sha256").hexdigest()

        return timed(one, size), timed(lambda: flush_files(Path(folder), ["file"]), size)


def learner_ratios(blocks: int, rate: float) -> list[float]:
    """Median time of a step in each block with a copy under way, as a multiple of that in the block beside it."""
    from agentrl.assets import tiny_model_path
    from agentrl.core.manifest import shares
    from agentrl.core.remote import put_files
    from tests.checkpoint_support import save, started, train

    os.environ[RATE] = str(rate)
    fsspec.register_implementation("throttled", ThrottledFileSystem, clobber=True)
    learner, step = started(str(tiny_model_path()), 2), 3
    train(learner, 0, step)
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(learner, folder / "saved", step)
        (files,) = shares(learner.flush_checkpoint(str(folder / "saved")), 1)
        for block in range(blocks):
            times: dict[bool, float] = {}
            for upload in (False, True) if block % 2 else (True, False):
                copy = threading.Thread(target=put_files, args=(files, folder / "saved", f"throttled://{name}/{block}"))
                if upload:
                    copy.start()
                taken = []
                for _ in range(STEPS_PER_BLOCK):
                    begin = time.perf_counter()
                    train(learner, step, step + 1)
                    taken.append(time.perf_counter() - begin)
                    step += 1
                if upload:
                    if not copy.is_alive():
                        raise RuntimeError("the copy was over before the block: lower --mb-per-s")
                    copy.join()
                times[upload] = statistics.median(taken)
            ratios.append(times[True] / times[False])
    learner.close()
    return ratios


def step_s(folder: Path, steps: int, rate: float, upload: bool) -> tuple[float, dict[str, float]]:
    """Mean seconds from the metrics of one step to those of the next, and the last metrics of the copies."""
    run_dir = folder / "run"
    words = ["train", "--agent", str(ENVS / "arithmetic.py"), "--run-dir", str(run_dir), "--runtime", "local", "--num-steps", str(steps)]
    words += ["--save-every", str(SAVE_EVERY), "--no-tensorboard", "--no-save-model", "--skip-checks", "env"]
    words += ["--checkpoint-upload", f"throttled://{folder}/copies"] if upload else []
    command = [sys.executable, "-m", "tests.benchmarks.checkpoints", "--child", *words]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, RATE: str(rate)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    times = [row["time_s"] for row in rows[WARM:]]
    copies = {name: value for name, value in rows[-1].items() if name.startswith("checkpoint/")}
    return (times[-1] - times[0]) / (len(times) - 1), copies


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=44)
    parser.add_argument("--mb-per-s", type=float, default=4.0)
    flags = parser.parse_args()
    one, parts = hash_rates(flags.gib)
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    for name, (wall, cpu) in (("one thread", one), (f"in parts on {threads} threads", parts)):
        print(f"hash, {name}: {wall:.2f} GB/s, {cpu:.2f} GB per CPU second")
    if flags.blocks:
        found_ratios = sorted(learner_ratios(flags.blocks, flags.mb_per_s))
        middle = statistics.median(found_ratios)
        print(f"learner step with a copy under way: {middle:.3f} times ({found_ratios[0]:.3f} to {found_ratios[-1]:.3f})")
    ratios: list[float] = []
    for pair in range(flags.pairs):
        found: dict[bool, float] = {}
        for upload in (False, True) if pair % 2 else (True, False):
            with tempfile.TemporaryDirectory() as folder:
                found[upload], copies = step_s(Path(folder), flags.steps, flags.mb_per_s, upload)
            if upload:
                told = ", ".join(f"{name.partition('/')[2]} {value:.3g}" for name, value in copies.items())
        ratios.append(found[True] / found[False])
        print(f"step: {found[False]:.3f} s without, {found[True]:.3f} s with copies, {ratios[-1]:.3f} times; {told}", flush=True)
    if ratios:
        print(f"median of {len(ratios)}: {statistics.median(ratios):.3f} times")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.exit(child(sys.argv[2:]))
    main()
