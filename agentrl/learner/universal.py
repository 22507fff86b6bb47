"""Give an engine what was saved with another number of ranks or another ZeRO stage, parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.learner.engine import TrainEngine, parameter_groups, whole
from agentrl.learner.saved import MOMENTS, SavedEngine


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank's optimizer keeps its share of a parameter.

    Attributes:
        master: The float32 tensor that is updated, of one parameter or of many one after the other; the key of the optimizer's state.
        start: Where the share begins in it.
        first: Where the share begins in the flattened parameter.
        numel: Its length.
    """

    master: Tensor
    start: int
    first: int
    numel: int

    def put(self, value: Tensor, target: Tensor) -> None:
        """Write the share out of the whole `value` into `target`, which is `master` or shaped like it."""
        share = value.flatten()[self.first : self.first + self.numel]
        target.view(-1)[self.start : self.start + self.numel].copy_(share)


@torch.no_grad()
def restore(engine: TrainEngine, saved: SavedEngine) -> None:
    """Set weights, moments and counts of an engine that has not been trained; collective.

    Args:
        engine: Of a module with the parameters that were saved.
        saved: What to continue from.
    """
    optimizer = engine.engine.optimizer
    states = optimizer.state if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer.state
    places = dict(_places(engine))
    step = saved.last_step()
    if step is not None:
        fused = bool(optimizer.param_groups[0].get("fused"))
        states.update((master, _fresh_state(master, step, on_device=fused)) for master in _masters(engine))
    for name, parameter in _trained(engine.module):
        value = saved[name]
        with whole(parameter, modify=True) as weights:
            weights.copy_(value)
        place = places.get(parameter)
        if place is None:  # other ranks have it
            continue
        place.put(value, place.master)
        if step is not None:
            _restore_moments(states, place, saved, name)
    for name, buffer in engine.module.named_buffers():
        if name in saved.buffers:
            buffer.copy_(saved.buffers[name])
    for counter, count in saved.counters.items():
        setattr(engine.engine, counter, count)


def group_names(module: nn.Module, weight_decay: float) -> list[list[str]]:
    """Names of the trained parameters in each of the optimizer's groups."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [[names[parameter] for parameter in group["params"]] for group in parameter_groups(module, weight_decay)]


def _trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def _fresh_state(master: Tensor, step: float, *, on_device: bool) -> dict[str, Tensor]:
    """What AdamW makes before its first update, but for the count."""
    counted = torch.tensor(step, dtype=torch.float32, device=master.device if on_device else "cpu")
    return {"step": counted, **{key: torch.zeros_like(master) for key in MOMENTS}}


def _restore_moments(states: dict[Tensor, Any], place: Place, saved: SavedEngine, name: str) -> None:
    state, alone = states[place.master], place.master.numel() == place.numel
    for key in MOMENTS:
        if (moment := saved.moment(name, key)) is not None:
            place.put(moment, state[key])
    if alone and (step := saved.step(name)) is not None:
        state["step"].fill_(step)
    elif alone:  # not updated so far, as happens to experts that no token is sent to
        del states[place.master]


def _masters(engine: TrainEngine) -> list[Tensor]:
    """Every tensor that this rank's optimizer updates; under ZeRO also those without a share in them, which are padding."""
    optimizer = engine.engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return list(optimizer.fp32_partitioned_groups_flat)
    return [master for group in optimizer.param_groups for master in group["params"]]


def _places(engine: TrainEngine) -> Iterator[tuple[nn.Parameter, Place]]:
    """This rank's share of each parameter, for each of DeepSpeed's optimizers."""
    optimizer: Any = engine.engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        yield from _sliced_places(optimizer, engine.ranks.rank)
    elif hasattr(optimizer, "fp32_groups"):  # bfloat16 without ZeRO: copies, parameter by parameter
        for parameters, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for parameter, master in zip(parameters, masters, strict=True):
                yield parameter, Place(master, 0, 0, master.numel())
    else:
        for _, parameter in _trained(engine.module):
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is not None:
                master = optimizer.param_groups[mapping.param_group_index]["params"][0]
                address = mapping.lp_fragment_address
                yield parameter, Place(master, mapping.hp_fragment_address.start, address.start, address.numel)
            elif not hasattr(parameter, "_hp_mapping"):  # no ZeRO, and the weights are what is updated
                yield parameter, Place(parameter, 0, 0, parameter.numel())


def _sliced_places(optimizer: Any, rank: int) -> Iterator[tuple[nn.Parameter, Place]]:
    """Stage 3: equally long slices, those of the last ranks padded or empty."""
    for parameters, master in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        start = 0
        for parameter in parameters:
            numel = parameter.ds_tensor.ds_numel
            first = min(rank * numel, parameter.ds_numel)
            yield parameter, Place(master, start, first, min(numel, parameter.ds_numel - first))
            start += numel
