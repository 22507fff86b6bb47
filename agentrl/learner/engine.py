"""A module with its optimizer under DeepSpeed: exact gradients of a global loss, one update at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any, Literal

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload
from torch import Tensor, nn

from agentrl.core.errors import NonFiniteError
from agentrl.core.metrics import MetricSums
from agentrl.learner.gradients import ALONE, lighten
from agentrl.learner.optimizers import build_optimizer, full_shape
from agentrl.learner.plan import LearnerConfig
from agentrl.learner.ranks import Ranks
from agentrl.learner.settings import BUCKET_ELEMENTS


def deepspeed_config(config: LearnerConfig, *, bf16: bool, trained: bool = True) -> dict[str, Any]:
    """Return DeepSpeed's configuration; bfloat16 has float32 master weights, and a model that is not trained has no optimizer."""
    zero = zero_config(config, trained=trained)
    options: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        # The number of micro-batches varies, so the boundary is set by hand and nothing is divided by this number; more
        # than 1 makes the offloading code accumulate at all.
        "gradient_accumulation_steps": 2 if trained else 1,
        "gradient_clipping": config.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }
    if config.learner_tensor_parallel > 1:
        options["tensor_parallel"] = {"autotp_size": config.learner_tensor_parallel, "vocab_parallel_lm_head": False}
    if config.deepcompile and trained:
        options["compile"] = {"deepcompile": True}
    if bf16:
        options["bf16"] = {"enabled": True, "check_grad_overflow": True}
        if config.zero_stage:
            options["data_types"] = {"grad_accum_dtype": "fp32"}
        if config.fp32_communication:
            options["communication_data_type"] = "fp32"
    return options


def zero_config(config: LearnerConfig, *, trained: bool = True) -> dict[str, Any]:
    """Return the part of DeepSpeed's configuration that is about ZeRO."""
    stage = config.zero_stage if trained or config.zero_stage == 3 else 0
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET_ELEMENTS, "allgather_bucket_size": BUCKET_ELEMENTS}
    if stage:
        zero["overlap_comm"] = True
    if config.zero_stage == 3:
        zero["zero_hpz_partition_size"] = config.zero_hpz_size if trained else 1  # for the backward pass
        zero["zero_quantized_weights"] = config.zero_quantized_weights
        zero["zero_quantized_gradients"] = config.zero_quantized_gradients and trained
    if config.optimizer_offload and config.zero_stage and trained:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if config.reference_offload and config.zero_stage == 3 and not trained:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return zero


class TrainEngine:
    """Trains one module: accumulate any number of micro-batches, then update.

    The loss given to `accumulate` is this micro-batch's share of the loss over all micro-batches and all ranks; the
    gradient that is applied is the gradient of the sum, whatever the ZeRO stage and the number of ranks.
    """

    def __init__(self, module: nn.Module, config: LearnerConfig, ranks: Ranks, *, bf16: bool) -> None:
        self.config, self.ranks = config, ranks
        self.skipped_in_a_row = 0
        optimizer = build_optimizer(module, config)
        options = deepspeed_config(config, bf16=bf16)
        trained = sum(full_shape(parameter).numel() for group in optimizer.param_groups for parameter in group["params"])
        options["zero_optimization"]["reduce_bucket_size"] = min(BUCKET_ELEMENTS, trained)  # it is made whole, for an adapter too
        alone = ranks.world_size == 1 and config.zero_stage == 2 and bf16 and not config.optimizer_offload
        options["zero_optimization"].update(ALONE if alone else {})
        self.engine = _initialize(module, options, optimizer)
        lighten(self.engine.optimizer, alone=alone)
        self.engine.train()
        if config.deepcompile:
            self.engine.compile()

    @property
    def module(self) -> nn.Module:
        """The module being trained."""
        module: nn.Module = self.engine.module
        return module

    def __call__(self, *inputs: Any) -> Any:
        """Run the module forward."""
        return self.engine(*inputs)

    def accumulate(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of one micro-batch's share of the loss, a scalar; `last` marks the one before `update`."""
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages gradients over ranks with equal parts of layers; the loss is a sum over them.
        self.engine.backward(loss * (self.ranks.world_size // self.ranks.tensor_parallel), scale_wrt_gas=False)

    def update(self, learning_rate: float) -> float | None:
        """Clip and apply the accumulated gradient; return its global norm, or `None` if it was not finite and the update was skipped.

        Raises:
            NonFiniteError: If more than ``max_nonfinite_steps`` updates in a row had to be skipped.
        """
        # Not by a scheduler of DeepSpeed, which counts updates: a step of the run may have several.
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = self._update_plain() if self._plain else self._update_wrapped()
        self.skipped_in_a_row = 0 if norm is not None else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= self.config.max_nonfinite_steps:
            raise NonFiniteError(
                f"the gradient was not finite for {self.skipped_in_a_row} updates in a row (--max-nonfinite-steps); the weights are those "
                "before the first of them. Lower --learning-rate or --max-grad-norm, or look for extreme rewards"
            )
        return norm

    @property
    def _plain(self) -> bool:
        """True if DeepSpeed does not wrap the optimizer, and so neither clips gradients nor checks for overflow."""
        return isinstance(self.engine.optimizer, torch.optim.Optimizer)

    def _update_plain(self) -> float | None:
        norm = self._norm()
        if not _finite(norm):
            self.engine.zero_grad()
            return None
        self.engine.step()
        return norm

    def _norm(self) -> float:
        parameters = [p for p in self.engine.module.parameters() if p.grad is not None]
        whole, parts = ([p.grad for p in parameters if is_divided(p) == divided] for divided in (False, True))
        norm = torch.nn.utils.get_total_norm(whole)
        if parts:
            squares = torch.nn.utils.get_total_norm(parts) ** 2
            dist.all_reduce(squares, group=deepspeed.utils.groups.get_tensor_model_parallel_group())
            norm = (norm**2 + squares).sqrt()
        return float(norm)

    def _update_wrapped(self) -> float | None:
        self.engine.step()
        return float(self.engine.get_global_grad_norm()) if self.engine.was_step_applied() else None

    def close(self) -> None:
        """Release DeepSpeed's hooks and buffers, and the memory of weights and optimizer with the module; safe to call twice."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.destroy()
            _take_apart(engine)


def _initialize(module: nn.Module, options: dict[str, Any], optimizer: torch.optim.Optimizer | None = None) -> Any:
    """DeepSpeed's engine around a module, which it divides over ranks first if the options say so."""
    divided = "tensor_parallel" in options
    if divided:
        module.config = module.model.config  # type: ignore[union-attr]
    if options["zero_optimization"]["stage"] == 3:
        gather_blocks_of_experts(module)
    with redirect_stdout(StringIO()):
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=options)
    if divided:
        engine.first_dataloader_check.remove()  # it compares the arguments of ranks, but knows no micro-batches
    return engine


def _take_apart(engine: Any) -> None:
    """Release the weights of the module, and what an engine of DeepSpeed, its optimizers and its hooks hold of each other.

    They form cycles, as modules do, which stay until some later garbage collection, and after `gc.freeze` for good. Under ZeRO-3 a global
    list has the module, too.
    """
    modules = parameter_offload.FWD_MODULE_STACK
    modules[:] = [module for module in modules if module is not engine.module]
    optimizer = engine.optimizer
    for parameter in engine.module.parameters():
        parameter.grad = None
        parameter.data = parameter.data.new_empty(0)
        vars(parameter).clear()
    for holder in (getattr(optimizer, "optimizer", None), getattr(optimizer, "parameter_offload", None), optimizer, engine):
        if holder is not None:
            vars(holder).clear()


def gather_blocks_of_experts(module: nn.Module) -> None:
    """Let ZeRO-3 gather each block of experts at once, with its router, whichever of them a rank's tokens go to.

    DeepSpeed does so by itself for some architectures. Module by module, ranks whose tokens go to other experts would wait for each other.
    """
    kinds = set()
    for block in module.modules():
        experts = dict(block.named_children()).get("experts")
        if experts is not None:  # where they are beside the attention in the layer, they are a block by themselves
            kinds.add(type(experts if hasattr(block, "self_attn") else block))
    if kinds:
        deepspeed.utils.set_z3_leaf_modules(module, list(kinds))


def is_divided(parameter: Tensor) -> bool:
    """Return True for a parameter of which this rank holds a part because of ``--learner-tensor-parallel``."""
    return bool(getattr(parameter, "ds_is_replaced_module", False))


@torch.no_grad()
def undivided(parameter: Any, tensor: Tensor) -> Tensor:
    """Return the whole of a divided parameter, of which `tensor` is this rank's part, and any other as it is; collective."""
    if not is_divided(parameter):
        return tensor
    held = parameter.data
    parameter.data = tensor
    try:
        parameter.gather_params([parameter])
        whole: Tensor = parameter.data
    finally:
        parameter.data = held
    return whole


@contextmanager
def gathered_parameter(parameter: nn.Parameter, *, modify: bool = False) -> Iterator[Tensor]:
    """The whole parameter of a module under DeepSpeed, gathered from all ranks if it is in parts; a collective operation under ZeRO-3.

    With `modify`, what the block writes into it is kept; every rank must write the same.
    """
    if hasattr(parameter, "ds_id"):
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if modify else None):
            yield parameter.data
    else:
        yield parameter.data


def whole_parameters(model: nn.Module, *, trained: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under its name in the model, one at a time, tied ones once; with `trained`, only those that are trained.

    Under ZeRO-3 gathering a parameter is a collective operation: every rank iterates to the end. A tensor is valid
    until the next one is asked for.
    """
    for name, parameter in model.named_parameters():
        if trained and not parameter.requires_grad:
            continue
        with gathered_parameter(parameter) as tensor:
            yield name, undivided(parameter, tensor)


def copied(parameters: Iterable[tuple[str, Tensor]], *, keep: bool) -> dict[str, Tensor]:
    """Return copies of the parameters in CPU memory, on ranks that are to `keep` them; every rank iterates to the end."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in parameters if keep}


def partition_frozen(module: nn.Module, config: LearnerConfig, device: torch.device, *, bf16: bool) -> nn.Module:
    """A module that is only ever run forward, on the device or in CPU memory; under ZeRO-3 in parts like those being trained."""
    divided = config.learner_tensor_parallel > 1  # DeepSpeed then wants to follow gradients of norms
    module.eval().requires_grad_(divided)
    if config.zero_stage < 3 and not divided:
        if not config.reference_offload:
            return module.to(device)
        kept: Any = module
        return kept._apply(Tensor.pin_memory) if device.type == "cuda" else module
    frozen: nn.Module = _initialize(module, deepspeed_config(config, bf16=bf16, trained=False))
    frozen.requires_grad_(False).eval()
    return frozen


@contextmanager
def on_device(module: Any, device: torch.device) -> Iterator[None]:
    """Within the block, a module that is kept in CPU memory is on the device; the copy in CPU memory stays as it is."""
    tensors = [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else []
    held = [(tensor, tensor.data) for tensor in tensors if tensor.device != device and not hasattr(tensor, "ds_id")]
    for tensor, data in held:
        tensor.data = data.to(device, non_blocking=True, copy=True)
    try:
        yield
    finally:
        for tensor, data in held:
            tensor.data = data


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Give `target` the weights of `source`, parameter by parameter; both are equally partitioned or not at all."""
    for mine, theirs in zip(source.parameters(), target.parameters(), strict=True):
        with gathered_parameter(mine) as tensor, gathered_parameter(theirs, modify=True) as copy:
            copy.copy_(tensor)


def _finite(value: float) -> bool:
    return value - value == 0.0


def learning_rate(
    step: int, *, peak: float, schedule: Literal["constant", "linear", "cosine"], warmup_steps: int, num_steps: int, min_ratio: float
) -> float:
    """Return the learning rate of a step, counted from 0.

    Rises linearly from ``peak / warmup_steps`` in the first step to `peak` (at once without warm-up), then follows the schedule down to
    ``peak * min_ratio`` in the last step; later steps keep that value.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps))
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
