"""State that DeepSpeed saved of one engine, complete and by parameter name, for any number of ranks and any ZeRO stage.

Files are mapped into memory, not read, so looking at one parameter costs the memory of that parameter. DeepSpeed has a
converter of its own, which is not used here: it knows no stage 0, gives every parameter under stage 3 the weight decay of the
first, and unpickles whatever the files hold.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.core.errors import CheckpointError
from agentrl.learner.deepspeed.parameters import PARAMETERS
from agentrl.learner.optimizer_table import OptimizerSettings
from agentrl.learner.optimizers import parameter_groups
from agentrl.learner.saved import MOMENTS, NUM_LEARNERS, Layout, SavedState, join_slices, read_tensors

TAG = "state"
ZERO_STAGE, DIVIDED = "--zero-stage", "--learner-tensor-parallel"
"""Facts that the files depend on beside the number of ranks."""
MASTER = "master"

Piece = dict[str, Tensor]
"""A slice of a flattened parameter, or all of it: the float32 weights, the moments, and how many updates they have seen."""


class SavedEngine:
    """One engine of a checkpoint, read from the folder it was saved to.

    `groups` names the trained parameters in each of the optimizer's groups, because without ZeRO the file has only their order. `counters`
    are DeepSpeed's own counts of steps, `buffers` the tensors of the module that are not parameters, by name.
    """

    def __init__(self, folder: Path, *, num_ranks: int, zero_stage: int, groups: Sequence[Sequence[str]]) -> None:
        state = folder / TAG
        prefix = "zero_pp_rank_0_" if zero_stage == 3 else ""
        model = read_saved(state / f"{prefix}mp_rank_00_model_states.pt")
        self.counters: dict[str, int] = {name: model[name] for name in ("global_steps", "global_samples", "skipped_steps")}
        self.buffers: dict[str, Tensor] = {name: model["module"][name] for name in model["buffer_names"] if name in model["module"]}
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        if zero_stage == 0:
            self._shapes = {name: model["module"][name].shape for group in groups for name in group}
            self._take_whole(model, groups)
            return
        self._shapes = {name: shape for group in model["param_shapes"] for name, shape in group.items()}
        for part in _optimizer_parts(state, num_ranks):
            if zero_stage == 3:
                self._take_slices(part, model["param_shapes"], num_ranks)
            else:
                self._take_fragments(part)

    def __getitem__(self, name: str) -> Tensor:
        """A parameter in float32, as the optimizer has it."""
        return self._whole(name, MASTER)

    def moment(self, name: str, key: str) -> Tensor | None:
        """One of the `MOMENTS` of a parameter; `None` before its first update."""
        return self._whole(name, key) if key in self._pieces[name][0] else None

    def step(self, name: str) -> float | None:
        """Updates that the moments of a parameter have seen; `None` before the first."""
        step = self._pieces[name][0].get("step")
        return None if step is None else float(step)

    def last_step(self) -> float | None:
        """The most updates that any parameter has seen, which is what ZeRO counts."""
        return max((step for name in self._shapes if (step := self.step(name)) is not None), default=None)

    def _whole(self, name: str, key: str) -> Tensor:
        if name not in self._shapes:
            raise CheckpointError(f"the checkpoint has no parameter {name}: it is of another model")
        return join_slices([piece[key] for piece in self._pieces[name]], self._shapes[name])

    def _take_whole(self, model: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> None:
        """Without ZeRO: the state of the first rank's optimizer, by the parameters' places in its groups."""
        optimizer = model["optimizer"]
        masters = optimizer.get("fp32_groups")  # not in float32 training, whose weights they are
        plain = optimizer.get("optimizer_state_dict", optimizer)
        states, sizes, place = plain["state"], [len(group["params"]) for group in plain["param_groups"]], 0
        if sizes != [len(names) for names in groups]:
            raise CheckpointError(
                f"the optimizer had groups of {sizes} parameters, now {[len(names) for names in groups]}: --weight-decay differs"
            )
        for number, names in enumerate(groups):
            for index, name in enumerate(names):
                master = model["module"][name] if masters is None else masters[number][index]
                self._pieces[name].append(_piece(master, states.get(place, {}), 0, master.numel()))
                place += 1

    def _take_fragments(self, part: Mapping[str, Any]) -> None:
        """Stages 1 and 2: a rank's stretch of each group, with a table of what lies where."""
        states = part["base_optimizer_state"]["state"]
        for number, table in enumerate(part["param_slice_mappings"]):
            master = part["single_partition_of_fp32_groups"][number]
            for name, place in table.items():
                self._pieces[name].append(_piece(master, states.get(number, {}), place.start, place.numel))

    def _take_slices(self, part: Mapping[str, Any], shapes: Sequence[Mapping[str, torch.Size]], num_ranks: int) -> None:
        """Stage 3: an equally long slice of every parameter, padded at the end, one after the other."""
        states = part["optimizer_state_dict"]["state"]
        for number, group in enumerate(shapes):
            start = 0
            for name, shape in group.items():
                numel = -(-shape.numel() // num_ranks)
                self._pieces[name].append(_piece(part["fp32_flat_groups"][number], states.get(number, {}), start, numel))
                start += numel


def saved_engine(folder: Path, layout: Layout, module: nn.Module, settings: OptimizerSettings) -> SavedEngine:
    """Return the saved state of an engine, read from its folder within a checkpoint.

    `module` has the saved parameters, of which only the names are used; `layout` is that of each ``rank-N.pt``.
    """
    if DIVIDED in layout:
        parts = layout[DIVIDED]
        raise CheckpointError(f"layers in {folder} are in {parts} parts; resume with the same ranks, ZeRO stage and {DIVIDED} {parts}")
    groups = _group_names(module, settings)
    return SavedEngine(folder, num_ranks=layout[NUM_LEARNERS], zero_stage=layout[ZERO_STAGE], groups=groups)


def _piece(master: Tensor, state: Mapping[str, Tensor], start: int, numel: int) -> Piece:
    flat = {MASTER: master, **{key: state[key] for key in MOMENTS if key in state}}
    piece = {key: tensor.flatten().narrow(0, start, numel) for key, tensor in flat.items()}
    return {**piece, "step": torch.as_tensor(state["step"])} if "step" in state else piece


def _optimizer_parts(folder: Path, num_ranks: int) -> Iterator[Mapping[str, Any]]:
    found = {int(match[1]): path for path in folder.iterdir() if (match := re.search(r"zero_pp_rank_(\d+)_.*optim_states\.pt$", path.name))}
    if sorted(found) != list(range(num_ranks)):
        raise CheckpointError(f"{folder} has the optimizer's parts of ranks {sorted(found)}, not of all {num_ranks}")
    for rank in range(num_ranks):
        yield read_saved(found[rank])["optimizer_state_dict"]


def read_saved(path: Path) -> dict[str, Any]:
    """A file that DeepSpeed wrote, mapped into memory; code in it is refused, but for a few classes of DeepSpeed without any."""
    with only_data():
        return read_tensors(path)


@contextmanager
def only_data() -> Iterator[None]:
    """Make every ``torch.load`` refuse pickled code, DeepSpeed's too; it asks for the contrary, torch's own switch overrules it."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    def zero_stage(kind: object, member: str) -> ZeroStageEnum:  # Python before 3.11.4 pickles a member as getattr(class, name)
        if kind not in (ZeroStageEnum,):
            raise UnpicklingError(f"getattr({kind!r}, {member!r})")
        return ZeroStageEnum[member]

    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        known = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
        with torch.serialization.safe_globals([*known, *((zero_stage, f"{module}.getattr") for module in ("builtins", "__builtin__"))]):
            yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@dataclass(frozen=True, slots=True)
class Place:
    """Place of this rank's share of a parameter in its optimizer."""

    master: Tensor  # the float32 tensor that is updated, of one parameter or of many one after the other; the key of the optimizer's state
    start: int  # where the share begins in it
    first: int  # where the share begins in the flattened parameter
    numel: int  # its length

    def put(self, value: Tensor, target: Tensor) -> None:
        """Write the share out of the whole `value` into `target`, which is `master` or shaped like it."""
        share = value.flatten()[self.first : self.first + self.numel]
        target.view(-1)[self.start : self.start + self.numel].copy_(share)


@torch.no_grad()
def restore(engine: Any, saved: SavedState, rank: int) -> None:
    """Set weights, moments and counts of an engine of DeepSpeed that has not been trained to the saved ones; collective."""
    optimizer = engine.optimizer
    states = optimizer.state if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer.state
    places = dict(_places(engine, rank))
    step = saved.last_step()
    if step is not None:
        states.update((master, _fresh_state(master, step)) for master in _masters(engine))
    for name, parameter in _trained(engine.module):
        value = saved[name]
        with PARAMETERS.gathered(parameter, modify=True) as weights:
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
        setattr(engine, counter, count)


def _group_names(module: nn.Module, settings: OptimizerSettings) -> list[list[str]]:
    """Names of the trained parameters in each of the optimizer's groups."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [[names[parameter] for parameter in group["params"]] for group in parameter_groups(module, settings, PARAMETERS)]


def _trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def _fresh_state(master: Tensor, step: float) -> dict[str, Tensor]:
    """Return AdamW's state before its first update, without the count."""
    counted = torch.tensor(step, dtype=torch.float32, device=master.device)
    return {"step": counted, **{key: torch.zeros_like(master) for key in MOMENTS}}


def _restore_moments(states: dict[Tensor, Any], place: Place, saved: SavedState, name: str) -> None:
    state, alone = states[place.master], place.master.numel() == place.numel
    for key in MOMENTS:
        if (moment := saved.moment(name, key)) is not None:
            place.put(moment, state[key])
    if alone and (step := saved.step(name)) is not None:
        state["step"].fill_(step)
    elif alone:  # not updated so far, as happens to experts that no token is sent to
        del states[place.master]


def _masters(engine: Any) -> list[Tensor]:
    """Every tensor that this rank's optimizer updates; under ZeRO also those without a share in them, which are padding."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return list(optimizer.fp32_partitioned_groups_flat)
    return [master for group in optimizer.param_groups for master in group["params"]]


def _places(engine: Any, rank: int) -> Iterator[tuple[nn.Parameter, Place]]:
    """Yield each parameter with this rank's share of it, for each of DeepSpeed's optimizers."""
    optimizer: Any = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        yield from _sliced_places(optimizer, rank)
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
