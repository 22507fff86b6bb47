"""The trials of a machine, in a process of their own: ``python -m agentrl.doctor.machine.trials DEVICE PARENT NAME ...``.

A trial that crashes or hangs, as kernels and links do where something is wrong, costs its own finding alone, because
`agentrl.doctor.machine.examine` starts the next ones anew. Each line that is written is a JSON object: a trial that begins or ends, a
finding, or rates.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, Any

from agentrl.core.operating_system import end_with_parent
from agentrl.doctor.machine.findings import Finding, Level
from agentrl.resolve.sizing.rates import Rates

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial, and the time that it has."""

    part: str  # of the findings
    limit_s: float  # without the imports of a first trial
    doc: str


TRIALS: Mapping[str, Trial] = {
    "rates": Trial("rates", 30.0, "rates of matrix products, memory and transfers"),
    "kernels": Trial("kernels", 40.0, "kernels of attention against eager attention"),
    "head": Trial("kernels", 30.0, "the output layer in chunks"),
    "shared": Trial("bytes", 50.0, "bytes by shared memory or CUDA IPC"),
    "collective": Trial("bytes", 50.0, "bytes by gloo or NCCL"),
    "transformers": Trial("training", 60.0, "two steps with the engine of transformers"),
    "vllm": Trial("training", 100.0, "two steps with vLLM"),
}


async def findings(name: str, device: torch.device) -> AsyncIterator[Finding | Rates]:
    """Run one trial."""
    if name in ("transformers", "vllm"):
        from agentrl.doctor.machine.rounds import rounds

        async for finding in rounds(name, device):  # type: ignore[arg-type]
            yield finding
        return
    for plain in _plain(name, device):
        yield plain


def _plain(name: str, device: torch.device) -> Iterator[Finding | Rates]:
    if name == "rates":
        from agentrl.doctor.machine.speed import device_name, speed

        yield Finding(part="rates", name="device", found=device_name(device))
        yield from speed(device)
    elif name in ("kernels", "head"):
        from agentrl.doctor.machine import kernels

        yield from kernels.kernels(device) if name == "kernels" else kernels.head(device)
    else:
        from agentrl.doctor.machine import exchange

        yield from exchange.shared(device) if name == "shared" else exchange.collective(device)


def failed(name: str, reason: str) -> Finding:
    """Return the finding of a trial that did not come to its end."""
    trial = TRIALS[name]
    remedy = f"See what it says: python -m agentrl.doctor.machine.trials DEVICE 0 {name}, with cpu or cuda as DEVICE."
    return Finding(part=trial.part, name=trial.doc, level=Level.WRONG, found=reason, remedy=remedy)


def main(words: list[str]) -> None:
    """Run the trials that are named; whatever libraries print goes to standard error."""
    kind, parent, *names = words
    if int(parent):
        end_with_parent(int(parent))
    warnings.simplefilter("ignore")
    # Programs that a trial starts do not inherit the copy, so the pipe ends with this process.
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from agentrl.cluster.build import worker_environment
    from agentrl.config.schema import TrainConfig
    from agentrl.config.sections import changed
    from agentrl.resolve.parts import cluster_plan

    plan = cluster_plan(changed(TrainConfig(), device=kind))
    for name, value in worker_environment(plan.engine).items():  # libraries read some of it only once
        os.environ.setdefault(name, value)
    import torch

    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    for name in names:
        _tell(told, "begin", name)
        asyncio.run(_run(name, device, told))
        _tell(told, "end", name)


async def _run(name: str, device: torch.device, told: IO[str]) -> None:
    try:
        async for each in findings(name, device):
            _tell(told, "rates" if isinstance(each, Rates) else "finding", asdict(each))
    except Exception as error:  # the others are worth having
        import traceback

        traceback.print_exc()
        reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        _tell(told, "finding", asdict(failed(name, reason)))


def _tell(told: IO[str], kind: str, value: Any) -> None:
    told.write(json.dumps({"kind": kind, "value": value}) + "\n")
    told.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
