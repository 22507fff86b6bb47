"""Bytes that the learner's engine reads and writes for each parameter beside the model's own passes, and the kernels that it starts.

    python -m tests.benchmarks.gradient_bytes

counts them on a CPU, by looking at each operation of PyTorch: bfloat16 with sums of gradients and master weights in float32, fused AdamW,
one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.learner.deepspeed import engine as engines
from agentrl.learner.deepspeed.ranks import join

TENSORS, EACH = 40, 25_000
NO_KERNEL = (
    "view",
    "as_strided",
    "slice",
    "narrow",
    "split",
    "detach",
    "alias",
    "expand",
    "select",
    "unsqueeze",
    "reshape",
    "empty",
    "set_",
)


class Counted(TorchDispatchMode):
    """Counts bytes and kernels of what is computed within it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2]
        if not name.lstrip("_").startswith(NO_KERNEL):
            inputs = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)]
            written = [part for part in tree_leaves(output) if isinstance(part, Tensor)]
            if name.startswith("_fused_adam"):  # weights and both moments are written in place
                written = [part for group in (args[0], args[2], args[3]) for part in group]
            read = inputs[1:] if name.startswith(("copy_", "zero_", "fill_")) else inputs
            self.bytes[name] += sum(part.numel() * part.element_size() for part in (*read, *written))
            self.kernels += 1
        return output


class Toy(nn.Module):
    """Many parameters, and next to no computation."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(EACH)) for _ in range(TENSORS)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(part[:1] * x).sum() for part in self.parts]).sum()


def counted(ranks: Any, *, micros: int, lightened: bool = True, stage: int = 2) -> tuple[Counted, Counted]:
    """Return what summing the gradients of some micro-batches costs, and what the update does."""
    x = torch.ones(1, dtype=torch.bfloat16)
    with ExitStack() as stack:
        if not lightened:
            stack.enter_context(patch.object(engines, "lighten", lambda optimizer, alone: None))
            stack.enter_context(patch.object(engines, "ALONE", {}))
        engine = engines.ZeroEngine(Toy().bfloat16(), changed(TrainConfig(), zero_stage=stage).learner, ranks, bf16=True)

    def accumulate() -> None:
        for micro in range(micros):
            engine.accumulate(engine(x), last=micro == micros - 1)

    try:
        accumulate()
        engine.update(1e-6)
        with Counted() as summing:
            accumulate()
        with Counted() as updating:
            engine.update(1e-6)
    finally:
        engine.close()
    return summing, updating


def main() -> None:
    """Print the counts."""
    ranks = join(0, 1, master_port=0, master_addr="127.0.0.1", device="cpu", timeout_s=60)
    per_parameter: Callable[[Counted], float] = lambda count: sum(count.bytes.values()) / (TENSORS * EACH)  # noqa: E731
    for name, given in (
        ("DeepSpeed's ZeRO-1", {"stage": 1}),
        ("DeepSpeed's ZeRO-2", {"lightened": False}),
        ("DeepSpeed's ZeRO-3", {"stage": 3}),
        ("ZeRO-2 here", {}),
    ):
        for micros in (1, 2):
            summing, updating = counted(ranks, micros=micros, **given)  # type: ignore[arg-type]
            kernels = (summing.kernels + updating.kernels) / TENSORS
            print(
                f"{name}, {micros} micro-batches: {per_parameter(summing):.0f} bytes to sum gradients, "
                f"{per_parameter(updating):.0f} in the update; {kernels:.0f} operations for each tensor"
            )
    ranks.leave()


if __name__ == "__main__":
    main()
