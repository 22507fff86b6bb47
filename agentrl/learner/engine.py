"""Interface of a learner back-end: what trains a module and holds its parameters.

A back-end is a folder with three modules: ``plan`` (`FACTS`, its facts and rules, without torch), ``ranks`` (`join`, which makes a process
one of its ranks) and ``backend`` (`BACKEND`, an instance of `Backend`). `agentrl.learner.backends` has its name.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from agentrl.core.errors import NonFiniteError
from agentrl.core.metrics import MetricSums
from agentrl.learner.attention import Kernel
from agentrl.learner.backends import BACKENDS
from agentrl.learner.parameters import WHOLE, Parameters
from agentrl.learner.plan import LearnerConfig
from agentrl.learner.ranks import Ranks
from agentrl.learner.saved import Layout, SavedState
from agentrl.learner.sequence import SequenceGroup
from agentrl.learner.settings import LearnerSettings

MAX_NONFINITE = 3
"""Updates in a row whose gradient may be without a finite norm, each of them skipped, before a run ends."""


class TrainEngine(ABC):
    """Trains one module: accumulate any number of micro-batches, then update.

    The loss given to `accumulate` is this micro-batch's share of the loss over all micro-batches and all ranks; the
    gradient that is applied is the gradient of the sum, whatever the back-end and the number of ranks.
    """

    def __init__(self, config: LearnerConfig, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.skipped_in_a_row = 0

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The module being trained."""

    @property
    @abstractmethod
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, whose parameters are this rank's master weights."""

    @abstractmethod
    def __call__(self, *inputs: Any) -> Any:
        """Run the module forward."""

    @abstractmethod
    def accumulate(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of one micro-batch's share of the loss, a scalar; `last` marks the one before `update`."""

    def update(self, learning_rate: float) -> float | None:
        """Clip and apply the accumulated gradient; return its global norm, or `None` if it was not finite and the update was skipped.

        Raises:
            NonFiniteError: If `MAX_NONFINITE` updates in a row had to be skipped.
        """
        # Not by a scheduler, which counts updates: a step of the run may have several.
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = self._apply()
        self.skipped_in_a_row = 0 if norm is not None else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= MAX_NONFINITE:
            raise NonFiniteError(
                f"the gradient was not finite for {self.skipped_in_a_row} updates in a row; the weights are those before the first of "
                "them. Lower --learning-rate or --max-grad-norm, or look for extreme rewards"
            )
        return norm

    @abstractmethod
    def _apply(self) -> float | None:
        """Clip the gradient to ``max_grad_norm``, update, and drop it; return its norm, or `None` if it was not finite and only dropped."""

    def tensors(self) -> Iterator[Tensor]:
        """Master weights of this rank, and the optimizer's state of them."""
        yield from (part for group in self.optimizer.param_groups for part in group["params"])
        states = (part for state in self.optimizer.state.values() for part in state.values())
        yield from (part for part in states if isinstance(part, Tensor) and part.numel() > 1)

    @abstractmethod
    def save(self, folder: Path) -> list[Path]:
        """Write trained weights, buffers and the optimizer's state into a folder; return the files of this rank. Collective."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Restore what `save` wrote in the same layout. Collective."""

    @abstractmethod
    def restore(self, saved: SavedState) -> None:
        """Set weights and AdamW's state to those of a checkpoint of another layout, before the first update. Collective."""

    @abstractmethod
    def offload(self, *, keep_weights: bool) -> None:
        """Move gradients and optimizer to CPU memory, and the module's weights too unless they are kept."""

    @abstractmethod
    def reload(self) -> None:
        """Undo `offload`."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory of weights and optimizer with the module; safe to call twice."""


class Backend(ABC):
    """Everything that models need from a back-end beside `TrainEngine`; here for parameters that are whole on one rank."""

    parameters: Parameters = WHOLE
    """Access to the parameters of the models that it trains or freezes."""

    @abstractmethod
    def train(self, module: nn.Module, config: LearnerConfig, ranks: Ranks, *, bf16: bool) -> TrainEngine:
        """Return the module with its optimizer; bfloat16 has float32 master weights."""

    @abstractmethod
    def layout(self, config: LearnerConfig, ranks: Ranks) -> dict[str, Any]:
        """Return the facts that the files of a checkpoint depend on; without `agentrl.learner.saved.BACKEND_KEY` it is DeepSpeed's."""

    @abstractmethod
    def saved(self, folder: Path, layout: Layout, module: nn.Module, config: LearnerConfig) -> SavedState:
        """Return the state of a trained model from its folder within a checkpoint of that layout; `module` gives the parameters' names."""

    def loading(self, settings: LearnerSettings, *, trained: bool) -> AbstractContextManager[bool]:
        """Within the block, transformers loads a model as this back-end needs it; yields True if weights may go to the GPU at once.

        Raises:
            ConfigError: If the model cannot be trained with these settings.
        """
        del settings, trained
        return nullcontext(True)

    def freeze(self, module: nn.Module, config: LearnerConfig, device: torch.device, *, bf16: bool) -> nn.Module:
        """Return a module that is only ever run forward, on the device or, if the ``reference`` is offloaded, in CPU memory."""
        del bf16
        module.eval().requires_grad_(False)
        if "reference" not in config.offload:
            return module.to(device)
        kept: Any = module
        return kept._apply(Tensor.pin_memory) if device.type == "cuda" else module

    def tile_mlps(self, model: nn.Module) -> bool:
        """Run the MLP of each layer over a part of the tokens at a time; return False if there is none."""
        raise NotImplementedError(f"{type(self).__name__} refuses --tiled-mlp in its plan")

    def exchange_heads(self, kernel: Kernel, group: SequenceGroup, config: Any) -> str:
        """Register the kernel inside an exchange of tokens and heads between ranks with transformers, and return its name there."""
        raise NotImplementedError(f"{type(self).__name__} refuses --sequence-parallel in its plan")


def join(name: str, rank: int, world_size: int, **named: Any) -> Ranks:
    """Make this process a rank of a back-end; arguments as in `agentrl.learner.deepspeed.ranks.join`."""
    ranks: Ranks = import_module(f"{BACKENDS[name]}.ranks").join(rank, world_size, **named)
    return ranks


def backend_of(name: str) -> Backend:
    """Return a back-end, which is imported here; on a rank not before `join`."""
    backend: Backend = import_module(f"{BACKENDS[name]}.backend").BACKEND
    return backend


def learning_rate(
    step: int, *, peak: float, schedule: Literal["constant", "linear", "cosine"], warmup_steps: int, num_steps: int, min_ratio: float
) -> float:
    """Return the learning rate of a step, counted from 0.

    Rises linearly from ``peak / warmup_steps`` in the first step to `peak` in the last of the warm-up, so that no step is without effect;
    transformers begins with 0 and has `peak` one step later. The schedule then falls to ``peak * min_ratio`` behind the last step, as
    in transformers, and later steps keep that value.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    remaining = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (min_ratio + (1.0 - min_ratio) * remaining)


class Clock:
    """Adds up the wall time of named phases, and on a GPU, where a phase ends when the device has finished it, takes the peak of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as part of the phase `name`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin

    def record(self, stats: MetricSums) -> None:
        """Report ``time/<phase>_s``, ``time/train_s`` and ``memory/peak_gib``; of several ranks, the slowest and the fullest count."""
        for name, seconds in self._seconds.items():
            stats.high(f"time/{name}_s", seconds)
        stats.high("time/train_s", time.perf_counter() - self._start)
        if self._device.type == "cuda":
            stats.high("memory/peak_gib", torch.cuda.max_memory_allocated(self._device) / 2**30)
