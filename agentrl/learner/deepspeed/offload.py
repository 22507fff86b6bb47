"""The state of a model that is being trained, out of the GPU's memory and back, while engines on the same GPU generate."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.offload_states import offload_optimizer_states, reload_optimizer_states

from agentrl.learner.parameters import move

_MASTER = OffloadStateTypeEnum.hp_params
_WEIGHTS = OffloadStateTypeEnum.lp_params
_OPTIMIZER = OffloadStateTypeEnum.optim_states
_GRADIENTS = (OffloadStateTypeEnum.lp_grads, OffloadStateTypeEnum.contiguous_grad_buffer)


def offload(engine: Any, *, keep_weights: bool, pin: bool) -> None:
    """Move gradients, master weights and optimizer of a DeepSpeed engine to CPU memory, and the weights too unless they are kept.

    What is there already stays, so that the weights can follow later, and an optimizer that is always there is left alone. With `pin` the
    CPU memory is page-locked.
    """
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if not stage:  # DeepSpeed moves nothing without ZeRO
        offload_optimizer_states(optimizer, "cpu", pin_memory=pin)
        move(engine.module, torch.device("cpu"), weights=not keep_weights)
        _empty_cache()
        return
    states = [*_GRADIENTS, *([] if keep_weights else [_WEIGHTS])]
    if engine.zero_use_cpu_optimizer():  # what moved would come back to the GPU, where that optimizer cannot use it
        pass
    elif stage < 3:
        states += [_MASTER, _OPTIMIZER]
    else:
        _offload_sharded(optimizer, pin=pin)
    wanted = [state for state in states if state not in optimizer.offloaded_states]
    engine.offload_states(include=wanted, device=OffloadDeviceEnum.cpu, pin_memory=pin)


def reload(engine: Any, device: torch.device) -> None:
    """Undo `offload`; gradients, which nobody reads after a step, come back without their values where DeepSpeed drops them."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if not stage:
        move(engine.module, device, weights=True)
        reload_optimizer_states(optimizer, device)
        return
    if stage == 3 and _MASTER in optimizer.offloaded_states:
        for part in optimizer.fp32_partitioned_groups_flat:
            part.data = part.data.to(device)
        reload_optimizer_states(optimizer.optimizer, device)
        optimizer.offloaded_states -= {_MASTER, _OPTIMIZER}
    engine.reload_states()


def _offload_sharded(optimizer: Any, *, pin: bool) -> None:
    """Move master weights and optimizer of ZeRO-3 as DeepSpeed does for its own Adam; for PyTorch's, which we use, it refuses."""
    if _MASTER in optimizer.offloaded_states:
        return
    for part in optimizer.fp32_partitioned_groups_flat:
        held = torch.empty_like(part.data, device="cpu", pin_memory=pin and torch.cuda.is_available())
        part.data = held.copy_(part.data)
    offload_optimizer_states(optimizer.optimizer, "cpu", pin_memory=pin)
    optimizer.offloaded_states |= {_MASTER, _OPTIMIZER}


def _empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
