"""One machine from its limits to two steps of training, within three minutes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Literal

from agentrl.cluster.build import device as kind_of_device
from agentrl.core.process import num_gpus
from agentrl.doctor.machine.devices import devices
from agentrl.doctor.machine.findings import Finding, Level, MachineReport
from agentrl.doctor.machine.limits import limits
from agentrl.doctor.machine.packages import installed, packages
from agentrl.doctor.machine.trials import TRIALS, failed
from agentrl.engine.facts import ENGINES
from agentrl.resolve.sizing.rates import Rates, keep_rates, rates_file, rates_of

BUDGET_S = 170.0
"""Time of a whole examination."""
IMPORTS_S = 40.0
"""Time that the first trial of a process has beside its own, to import PyTorch and what it needs."""

Device = Literal["auto", "cpu", "cuda"]


@dataclass
class Trials:
    """Findings of the trials so far."""

    findings: list[Finding] = field(default_factory=list)
    rates: Rates = field(default_factory=Rates)
    device: str = ""  # name of the device


def _has_packages(trial: str) -> bool:
    """Return True for a trial that needs no package, or one that is there."""
    needed = ENGINES[trial].packages if trial in ENGINES else ()
    return not needed or any(package in installed() for package in needed)


def examine(
    device: Device = "auto", *, trials: bool = True, budget_s: float = BUDGET_S, tell: Callable[[str], object] = str
) -> MachineReport:
    """Look at this machine, try what a run needs, and keep the rates that were measured.

    Args:
        device: Kind of device to try; ``auto`` for GPUs where there are some.
        trials: False for facts alone, which takes a second.
        budget_s: Time after which no trial goes on.
        tell: Told what is tried.
    """
    begin = time.monotonic()
    if device != "cpu":
        num_gpus(device)  # remembers them before anything hides them
    found = [*facts()]
    made = Trials()
    if trials:
        names = [name for name in TRIALS if _has_packages(name)]
        run_trials(names, kind_of_device(device), made, end=begin + budget_s, tell=tell)
        if made.rates.date:
            kept = keep_rates(made.device, made.rates)
            where = f"rates.json in {rates_file().parent}" if kept else f"not: {rates_file()} cannot be written"
            made.findings.append(Finding(part="rates", name="kept", found=where))
    name = made.device or socket.gethostname()
    return MachineReport(
        host=socket.gethostname(), device=name, findings=(*found, *made.findings), seconds=time.monotonic() - begin, rates=made.rates
    )


def facts() -> Iterator[Finding]:
    """Look at everything that needs no trial."""
    yield from limits()
    yield from packages()
    yield from devices()


def run_trials(
    names: Sequence[str], kind: Literal["cpu", "cuda"], made: Trials, *, end: float, tell: Callable[[str], object] = str
) -> None:
    """Run trials one after the other in a process, and in a new one after one that crashed or took too long."""
    left = list(names)
    while left and time.monotonic() < end:
        with _child(left, kind) as (lines, errors):
            left = _follow(left, lines, errors, made, end, tell)
    made.findings.extend(map(_cut_off, left))


def _cut_off(name: str) -> Finding:
    """Return the finding of a trial that the whole examination had no time for, as on a busy machine."""
    return Finding(part=TRIALS[name].part, name=TRIALS[name].doc, level=Level.UNTRIED, found="no time was left")


def _follow(
    names: list[str], lines: queue.SimpleQueue[str], errors: IO[str], made: Trials, end: float, tell: Callable[[str], object]
) -> list[str]:
    """Take what a process tells of its trials; return those that a new process has to run."""
    deadline, left = min(end, time.monotonic() + IMPORTS_S + TRIALS[names[0]].limit_s), list(names)
    while left:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            made.findings.append(_cut_off(left[0]) if deadline >= end else failed(left[0], "did not end within its time"))
            return left[1:]
        if not line:  # the process has ended
            made.findings.append(failed(left[0], f"its process ended: {_last(errors)}"))
            return left[1:]
        message: dict[str, Any] = json.loads(line)
        kind, value = message["kind"], message["value"]
        if kind == "begin":
            tell(TRIALS[value].doc)
            deadline = min(end, time.monotonic() + IMPORTS_S + TRIALS[value].limit_s)
        elif kind == "end":
            left.remove(value)
        elif kind == "rates":
            made.rates = rates_of(value)
        else:
            _take(Finding(**{**value, "level": Level(value["level"])}), made)
    return left


def _take(finding: Finding, made: Trials) -> None:
    if (finding.part, finding.name) == ("rates", "device"):
        made.device = finding.found
    made.findings.append(finding)


@contextlib.contextmanager
def _child(names: Sequence[str], kind: str) -> Iterator[tuple[queue.SimpleQueue[str], IO[str]]]:
    """Start a process with trials; yields its lines, an empty one at its end, and the file of its errors."""
    words = [sys.executable, "-m", "agentrl.doctor.machine.trials", kind, str(os.getpid()), *names]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # Ray's processes have another working directory
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    # A file, because a full pipe that nobody reads would stop the process.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            start_new_session=True,
        )
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            yield lines, errors
        finally:
            with contextlib.suppress(ProcessLookupError):  # with everything that it started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reader.join()


def _read(stream: IO[str], lines: queue.SimpleQueue[str]) -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


def _last(errors: IO[str]) -> str:
    """Return the last line that a process wrote about its end."""
    errors.seek(0)
    return next((line.strip() for line in reversed(errors.read().splitlines()) if line.strip()), "without a word")
