"""Rates of a device: matrix products, its own memory, and transfers from and to the CPU."""

from __future__ import annotations

import datetime
import re
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch

from agentrl.core.operating_system import processor_name
from agentrl.doctor.machine.devices import peers, smi
from agentrl.doctor.machine.findings import Finding, judged
from agentrl.resolve.sizing.rates import Rates
from agentrl.track.text import counted

PART = "rates"
SIDE = {"cuda": 8192, "cpu": 1024}
BYTES = {"cuda": 2**30, "cpu": 2**27}
SECONDS = 0.5
"""Time that each rate is measured, after a first call that is not counted."""
SLOW_CLOCK = 0.6
"""Share of a GPU's highest clock under load below which heat or power holds it back."""


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or of the processor."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{processor_name()}, {counted(torch.get_num_threads(), 'thread')}"


def speed(device: torch.device) -> Iterator[Finding | Rates]:
    """Measure all rates of a device."""
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        found[f"matmul_{name}"] = rate = matmul_rate(device, dtype)
        yield Finding(part=PART, name=f"matmul {name}", found=f"{rate / 1e12:.3g} TFLOP/s")
    if device.type == "cuda":
        yield from under_load(device)
    found["memory"] = rate = memory_rate(device)
    yield Finding(part=PART, name="memory", found=f"{rate / 1e9:,.0f} GB/s read and written")
    if device.type == "cuda":
        for name, direction in (("host_to_device", "from the CPU"), ("device_to_host", "to the CPU")):
            found[name] = rate = transfer_rate(device, back=name == "device_to_host")
            yield Finding(part=PART, name=f"transfer {direction}", found=f"{rate / 1e9:.1f} GB/s, page-locked")
        if (count := torch.cuda.device_count()) > 1:
            yield peers([[one == other or torch.cuda.can_device_access_peer(one, other) for other in range(count)] for one in range(count)])
    whole = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else psutil.virtual_memory().total
    today = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    yield Rates(**found, device_bytes=float(whole), torch=torch.__version__, date=today)


def matmul_rate(device: torch.device, dtype: torch.dtype, side: int = 0) -> float:
    """Return floating-point operations per second of the product of two square matrices."""
    side = side or SIDE[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / seconds(lambda: left @ right, device)


def memory_rate(device: torch.device, size: int = 0) -> float:
    """Return bytes per second of a copy within the device, those read and those written."""
    source = torch.ones(size or BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), device)


def transfer_rate(device: torch.device, *, back: bool, size: int = 2**28) -> float:
    """Return bytes per second between page-locked memory and the device."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=device)
    source, target = (there, host) if back else (host, there)
    return size / seconds(lambda: target.copy_(source, non_blocking=True), device)


def seconds(function: Callable[[], Any], device: torch.device, *, at_least_s: float = SECONDS) -> float:
    """Return the median time of a call, which is repeated three times or more; a GPU has finished it."""
    function()
    times: list[float] = []
    wait(device)
    end = time.perf_counter() + at_least_s
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        function()
        wait(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def wait(device: torch.device) -> None:
    """Wait until a GPU has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def under_load(device: torch.device) -> Iterator[Finding]:
    """Clock and temperature while matrix products run, where ``nvidia-smi`` says them."""
    left = torch.randn(SIDE["cuda"], SIDE["cuda"], device=device, dtype=torch.bfloat16)
    for _ in range(1000):  # a second or more, which the device works off while it is asked
        torch.mm(left, left)
    answer = smi(f"--id={device.index or 0}", "--query-gpu=clocks.sm,clocks.max.sm,temperature.gpu", "--format=csv,noheader,nounits")
    wait(device)
    if (clock := clock_finding(answer)) is not None:
        yield clock


def clock_finding(answer: str) -> Finding | None:
    """Return the verdict on the clock under load from an answer of ``nvidia-smi``; nothing if it has no figures."""
    figures = re.match(r"\s*(\d+), (\d+), (\d+)", answer)
    if figures is None:
        return None
    now, highest, degrees = (int(figure) for figure in figures.groups())
    found = f"{now:,} of {highest:,} MHz at {degrees} degrees"
    remedy = "Look at nvidia-smi -q -d PERFORMANCE: heat, power or a limit that somebody set holds the GPU back."
    return judged(PART, "clock under load", found, warning=now < SLOW_CLOCK * highest, remedy=remedy)
