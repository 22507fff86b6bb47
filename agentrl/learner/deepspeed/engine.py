"""A module with its optimizer under DeepSpeed: exact gradients of a global loss, one update at a time."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload
from torch import Tensor, nn

from agentrl.learner.deepspeed import offload
from agentrl.learner.deepspeed.arguments import arguments
from agentrl.learner.deepspeed.gradients import ALONE, lighten
from agentrl.learner.deepspeed.options import deepspeed_config
from agentrl.learner.deepspeed.parameters import PARAMETERS, is_divided
from agentrl.learner.deepspeed.saved import restore
from agentrl.learner.deepspeed.saving import load_engine, save_engine
from agentrl.learner.engine import TrainEngine
from agentrl.learner.optimizers import build_optimizer
from agentrl.learner.plan import LearnerConfig
from agentrl.learner.ranks import Ranks
from agentrl.learner.saved import SavedState
from agentrl.learner.settings import BUCKET_ELEMENTS


class ZeroEngine(TrainEngine):
    """Trains one module under DeepSpeed, whatever the ZeRO stage and the number of ranks."""

    def __init__(self, module: nn.Module, config: LearnerConfig, ranks: Ranks, *, bf16: bool) -> None:
        super().__init__(config, ranks)
        optimizer = build_optimizer(module, config, PARAMETERS)
        options = deepspeed_config(config, bf16=bf16)
        trained = sum(PARAMETERS.shape(parameter).numel() for group in optimizer.param_groups for parameter in group["params"])
        options["zero_optimization"]["reduce_bucket_size"] = min(BUCKET_ELEMENTS, trained)  # it is made whole, for an adapter too
        alone = ranks.world_size == 1 and config.zero_stage == 2 and bf16 and "optimizer" not in config.offload
        options["zero_optimization"].update(ALONE if alone else {})
        self.engine = _initialize(module, options, optimizer)
        lighten(self.engine.optimizer, alone=alone)
        self.engine.train()
        if arguments(config).get("deepcompile"):
            self.engine.compile()

    @property
    def module(self) -> nn.Module:
        """The module being trained."""
        module: nn.Module = self.engine.module
        return module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, which DeepSpeed wraps under ZeRO and in bfloat16."""
        optimizer: torch.optim.Optimizer = getattr(self.engine.optimizer, "optimizer", self.engine.optimizer)
        return optimizer

    def __call__(self, *inputs: Any) -> Any:
        """Run the module forward."""
        return self.engine(*inputs)

    def accumulate(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of one micro-batch's share of the loss, a scalar; `last` marks the one before `update`."""
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages gradients over ranks with equal parts of layers; the loss is a sum over them.
        self.engine.backward(loss * (self.ranks.world_size // self.ranks.tensor_parallel), scale_wrt_gas=False)

    def _apply(self) -> float | None:
        if not self._plain:
            self.engine.step()
            return float(self.engine.get_global_grad_norm()) if self.engine.was_step_applied() else None
        norm = self._norm()
        if not _finite(norm):
            self.engine.zero_grad()
            return None
        self.engine.step()
        return norm

    @property
    def _plain(self) -> bool:
        """True if DeepSpeed does not wrap the optimizer, and so neither clips gradients nor checks for overflow."""
        return isinstance(self.engine.optimizer, torch.optim.Optimizer)

    def _norm(self) -> float:
        parameters = [p for p in self.engine.module.parameters() if p.grad is not None]
        whole, parts = ([p.grad for p in parameters if is_divided(p) == divided] for divided in (False, True))
        norm = torch.nn.utils.get_total_norm(whole)
        if parts:
            squares = torch.nn.utils.get_total_norm(parts) ** 2
            dist.all_reduce(squares, group=deepspeed.utils.groups.get_tensor_model_parallel_group())
            norm = (norm**2 + squares).sqrt()
        return float(norm)

    def save(self, folder: Path) -> list[Path]:
        """Let DeepSpeed write its files into a folder; return those of this rank. Collective."""
        return save_engine(self.engine, folder)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote in the same layout. Collective."""
        load_engine(self.engine, folder)

    def restore(self, saved: SavedState) -> None:
        """Set weights and AdamW's state to those of a checkpoint of another layout, before the first update. Collective."""
        restore(self.engine, saved, self.ranks.rank)

    def offload(self, *, keep_weights: bool) -> None:
        """Move gradients, master weights and optimizer to CPU memory, and the weights too unless they are kept."""
        offload.offload(self.engine, keep_weights=keep_weights, pin=self.ranks.device.type == "cuda")

    def reload(self) -> None:
        """Undo `offload`."""
        offload.reload(self.engine, self.ranks.device)

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


def partition_frozen(module: nn.Module, config: LearnerConfig, *, bf16: bool) -> nn.Module:
    """A module that is only ever run forward, in parts like those being trained."""
    module.eval().requires_grad_(config.learner_tensor_parallel > 1)  # DeepSpeed then wants to follow gradients of norms
    frozen: nn.Module = _initialize(module, deepspeed_config(config, bf16=bf16, trained=False))
    frozen.requires_grad_(False).eval()
    return frozen


def _finite(value: float) -> bool:
    return value - value == 0.0
