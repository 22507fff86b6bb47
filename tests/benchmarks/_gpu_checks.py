"""Checks of one GPU that compare: kernels with float32, bytes in another process by digest, and a run whose reward has to rise."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore

from agentrl.core.process import LOOPBACK
from agentrl.learner.attention import _reference, _varlen
from agentrl.weights.channels import CudaHandles, Handles, SharedBuffers
from agentrl.weights.digests import digest
from tests.shared_files import FileHandles

TRAIN_LIMIT_S = 240.0
KERNEL_ERROR, MISMATCH, REWARD_GAIN = 0.02, 0.1, 0.1
"""Targets: distance of a kernel's values and gradients from float32, as a share of the largest; mean difference between the
log-probabilities of engine and learner; and gain of the mean reward in the run."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """One line of the table."""

    name: str
    value: str
    target: str = ""
    met: bool = True


def kernels(sizes: tuple[int, int, int, int], device: torch.device) -> Iterator[Found]:
    """Values and gradients of attention over packed rows in bfloat16, against the same in float32, row by row."""
    rows, length, heads, key_heads = sizes
    torch.manual_seed(0)
    bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)
    parts = [torch.randn(rows * length, count, 64, device=device) for count in (heads, key_heads, key_heads)]
    exact = [part.bfloat16().float().requires_grad_() for part in parts]
    fast = [part.detach().bfloat16().requires_grad_() for part in exact]
    for window in (None, length // 3):
        want = _reference(*exact, bounds, length, 0.125, window, None, capped=False)
        got = _varlen(*fast, bounds, length, 0.125, window, None)
        weight = torch.randn_like(want)
        errors = [_distance(got, want)]
        gradients = (torch.autograd.grad((output * weight).sum(), tensors) for output, tensors in ((got.float(), fast), (want, exact)))
        errors += [_distance(mine, theirs) for mine, theirs in zip(*gradients, strict=True)]
        named = f"attention with {heads} heads on {key_heads}" + (f", window {window}" if window else "")
        value = "values, queries, keys, values' gradients off by " + ", ".join(f"{error:.4f}" for error in errors)
        yield Found(name=named, value=value, target=f"<= {KERNEL_ERROR}", met=max(errors) <= KERNEL_ERROR)


def buckets(count: int, size: int, device: torch.device) -> Iterator[Found]:
    """Buckets that another process reads through `SharedBuffers`, as colocated engines do, by digest; on a CPU by shared files."""
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    context: Any = torch.multiprocessing.get_context("spawn")
    back = context.Queue()
    process = context.Process(target=_read, args=(store.port, str(device), count, size, back), daemon=True)
    process.start()
    try:
        back.get(timeout=120)
        channel = SharedBuffers(store, 0, device, handles(device))
        halves = [channel.buffer(size, device) for _ in range(2)]
        sent, waits, begin = list[int](), list[Callable[[], object]](), time.perf_counter()
        for number in range(count):
            if number >= len(halves):
                waits.pop(0)()
            buffer = halves[number % 2].random_(0, 256)
            sent.append(digest(buffer.view(torch.int32), torch.int32))
            waits.append(channel.begin(buffer))
        for wait in waits:
            wait()
        took = time.perf_counter() - begin
        same = back.get(timeout=60) == sent
        channel.end()
    finally:
        process.terminate()
        process.join()
    value = f"{'equal' if same else 'WRONG'}, {count * size / took / 1e9:.2f} GB/s with digests"
    yield Found(name=f"{count} buckets of {size:,} bytes to another process", value=value, target="equal by digest", met=same)


def trained(steps: int, device: torch.device, *, whole: bool) -> Iterator[Found]:
    """A run of ``agentrl train`` with the engine of transformers: engine and learner agree, and its reward rises if it is a `whole` run."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--agent", "envs/calculator.py", "--engine", "transformers", "--runtime", "local", "--run-dir", f"{folder}/run"]
        flags += ["--num-steps", str(steps), "--learning-rate", "3e-4", "--max-new-tokens", "32"]
        words = [sys.executable, "-m", "agentrl", "train", *flags, "--device", device.type]
        began = time.perf_counter()
        ran = subprocess.run(words, capture_output=True, text=True, timeout=TRAIN_LIMIT_S, check=False)
        took = time.perf_counter() - began
        file = Path(folder, "run", "metrics.jsonl")
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    if ran.returncode or not lines:
        raise RuntimeError(next(iter(reversed(ran.stdout.strip().splitlines() or ran.stderr.strip().splitlines())), "no output"))
    few = max(1, len(lines) // 5)
    before, after = (statistics.fmean(line["reward/mean"] for line in some) for some in (lines[:few], lines[-few:]))
    worst = max(line["mismatch/mean"] for line in lines)
    yield Found(name="engine and learner, mean difference", value=f"{worst:.2e}", target=f"<= {MISMATCH}", met=worst <= MISMATCH)
    gained = after - before >= REWARD_GAIN or not whole
    value = f"{before:.2f} to {after:.2f} in {len(lines)} steps, {took:.0f} s"
    yield Found(name="reward of the calculator", value=value, target=f"rises by {REWARD_GAIN}", met=gained)


def handles(device: torch.device) -> Handles:
    """Handles of a device's memory: of CUDA IPC, or of files where there is no GPU."""
    return CudaHandles() if device.type == "cuda" else FileHandles()


def _read(port: int, device: str, count: int, size: int, back: Any) -> None:
    """Receive buckets in a process of its own, and answer with their digests."""
    kind = torch.device(device)
    channel = SharedBuffers(TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False), 1, kind, handles(kind))
    back.put("ready")
    found = []
    for _ in range(count):
        bucket = torch.empty(size, dtype=torch.uint8, device=kind)
        channel.begin(bucket)()
        found.append(digest(bucket.view(torch.int32), torch.int32))
    back.put(found)


def _distance(found: Tensor, wanted: Tensor) -> float:
    """Largest difference of two tensors, as a share of the largest number."""
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())
