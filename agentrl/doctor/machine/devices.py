"""GPUs as driver and ``nvidia-smi`` know them: seen or not, driver against CUDA, other programs on them, links between them."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.core.process import cuda_torch, num_gpus
from agentrl.doctor.machine.findings import Finding, Level, judged

PART = "devices"
MIB = 2**20
FIELDS = (
    *("name", "driver_version", "memory.total", "memory.used", "compute_mode", "mig.mode.current", "pcie.link.width.current"),
    *("pcie.link.width.max", "ecc.errors.uncorrected.volatile.total"),
)
QUERY_TIMEOUT_S = 20.0
TAKEN = 0.05
"""Share of a GPU's memory from which other programs are on it."""


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU, as ``nvidia-smi`` answers; words that it does not know are "[N/A]"."""

    name: str
    driver: str
    total: str  # MiB
    used: str  # MiB
    compute_mode: str
    mig: str
    width: str  # lanes
    max_width: str
    ecc_errors: str


def devices() -> Iterator[Finding]:
    """Look at the GPUs that this process may use."""
    cuda, count = cuda_torch(), num_gpus("auto")
    yield seen(cuda, count)
    if not count:
        return
    if cuda:
        yield driver(cuda, cuda_of_driver())
    cards = query()
    if not cards:
        yield Finding(
            part=PART, name="nvidia-smi", level=Level.UNTRIED, found="is not here or does not answer; memory and modes are not known"
        )
    for number, card in enumerate(cards):
        yield from condition(number, card)
    if len(cards) > 1:
        yield links(len(cards))


def seen(cuda: str, count: int) -> Finding:
    """Number of GPUs against the kind of machine that PyTorch is built for."""
    name = "GPUs"
    if count and not cuda:
        remedy = "Install PyTorch for CUDA: pip install torch, from an index whose builds are for GPUs."
        return Finding(part=PART, name=name, level=Level.WRONG, found=f"{count}, and PyTorch is built for CPUs", remedy=remedy)
    if cuda and not count:
        return Finding(
            part=PART, name=name, level=Level.WRONG, found=f"none seen, and PyTorch is built for CUDA {cuda}", remedy=_why_unseen()
        )
    return Finding(part=PART, name=name, found=f"{count}, PyTorch for CUDA {cuda}" if count else "none: runs compute on the CPU")


def _why_unseen(devices: Path = Path("/dev")) -> str:
    """Return the remedy for the most likely reason why a driver's GPUs are not seen."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and (not visible.strip() or visible.strip() == "-1"):
        return f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides all GPUs: unset it."
    # Under WSL the device is /dev/dxg, and there is no /dev/nvidia0.
    if not list(devices.glob("nvidia[0-9]*")) and not (devices / "dxg").exists():
        return "Neither driver nor device is here: start the container with its GPUs (docker run --gpus all), or load the driver."
    return "The device is here and the driver does not answer: look at nvidia-smi, and whether this user may open /dev/nvidia0."


def cuda_of_driver() -> tuple[int, int] | None:
    """Return the version of CUDA that the driver knows; `None` without a driver."""
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def driver(cuda: str, of_driver: tuple[int, int] | None) -> Finding:
    """Version of CUDA that the driver knows, against that of PyTorch: an older driver of the same major version still runs it."""
    if of_driver is None:
        return Finding(part=PART, name="driver", level=Level.UNTRIED, found="libcuda.so.1 cannot be asked")
    major, minor = (int(part) for part in f"{cuda}.0".split(".")[:2])
    found = f"knows CUDA {of_driver[0]}.{of_driver[1]}, PyTorch is built for {cuda}"
    remedy = f"Install a driver for CUDA {cuda}, or PyTorch for CUDA {of_driver[0]}.{of_driver[1]}."
    older = of_driver < (major, minor)
    return judged(PART, "driver", found, wrong=of_driver[0] < major, warning=older, remedy=remedy)


def query() -> list[Card]:
    """Return the GPUs that ``nvidia-smi`` lists; none where it cannot be asked."""
    lines = smi(f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits").splitlines()
    rows = ([word.strip() for word in line.split(",")] for line in lines)
    return [Card(*row) for row in rows if len(row) == len(FIELDS)]


def smi(*words: str) -> str:
    """Return what ``nvidia-smi`` answers, nothing if it fails."""
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        return subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def condition(number: int, card: Card) -> Iterator[Finding]:
    """Memory that others hold, and modes that a run cannot live with."""
    name, total, used = f"GPU {number}", _number(card.total), _number(card.used)
    remedy = "End the programs that nvidia-smi lists, or choose other GPUs with CUDA_VISIBLE_DEVICES."
    found = f"{card.name}, driver {card.driver}, {used / 1024:.1f} of {total / 1024:.1f} GiB held by others"
    yield judged(PART, name, found, warning=bool(total) and used > TAKEN * total, remedy=remedy)
    if card.compute_mode.startswith(("Exclusive", "Prohibited")):
        remedy = f"nvidia-smi -i {number} -c DEFAULT: an engine and a learner on one GPU are two processes."
        yield Finding(part=PART, name=f"{name}, mode", level=Level.WARNING, found=f"compute mode {card.compute_mode}", remedy=remedy)
    if card.mig == "Enabled":
        remedy = "Use whole GPUs for --colocate and for several ranks: parts of one know neither CUDA IPC between them nor NCCL."
        yield Finding(part=PART, name=f"{name}, MIG", level=Level.WARNING, found="is divided (MIG)", remedy=remedy)
    if _number(card.ecc_errors):
        found, remedy = (
            f"{card.ecc_errors} uncorrected errors of its memory",
            "Have the GPU reset or replaced; what it computes may be wrong.",
        )
        yield Finding(part=PART, name=f"{name}, memory errors", level=Level.WRONG, found=found, remedy=remedy)
    if 0 < _number(card.width) < _number(card.max_width):
        found = f"{card.width} of {card.max_width} lanes of PCIe"
        yield Finding(part=PART, name=f"{name}, PCIe", level=Level.WARNING, found=found, remedy="Look at its slot; transfers take longer.")


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0


def links(count: int) -> Finding:
    """NVLink, by which GPUs of one machine reach each other."""
    found = re.findall(r"^GPU (\d+):|^\s+Link \d+: ([\d.]+) GB/s", smi("nvlink", "--status"), re.MULTILINE)
    rates: dict[str, float] = {}
    for number, rate in found:
        # A line about a link belongs to the GPU that was named last.
        gpu = number or next(reversed(rates), "0")
        rates[gpu] = rates.get(gpu, 0.0) + float(rate or 0.0)
    slowest = min((rates.get(str(number), 0.0) for number in range(count)), default=0.0)
    remedy = "Without NVLink tensor parallelism is slow: prefer more engines to wider ones, and ranks with ZeRO-2 to ZeRO-3."
    text = f"{slowest:.0f} GB/s of each GPU" if slowest else "none, or not between all GPUs"
    return judged(PART, "NVLink", text, warning=not slowest, remedy=remedy)


def peers(reach: Sequence[Sequence[bool]]) -> Finding:
    """Direct access of GPUs to each other's memory; `reach` says it of each pair."""
    apart = [f"{one} and {other}" for one, row in enumerate(reach) for other in range(one + 1, len(row)) if not row[other]]
    remedy = "GPUs that cannot reach each other send through the CPU: look at IOMMU and ACS settings, and at nvidia-smi topo -m."
    found = f"not between {', '.join(apart[:4])}" if apart else f"between all {len(reach)} GPUs"
    return judged(PART, "direct access", found, warning=bool(apart), remedy=remedy)
