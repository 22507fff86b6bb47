"""Weights on their way out: named tensors for publication, a Hugging Face directory for people, and their moving average."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from agentrl.core.disk import write_problem
from agentrl.core.errors import AgentRLError, CheckpointError, ConfigError
from agentrl.core.files import swap_directory
from agentrl.core.language_models import copy_processor
from agentrl.core.tokenizers import load_tokenizer, quiet_transformers
from agentrl.learner.backends import DEEPSPEED
from agentrl.learner.engine import backend_of
from agentrl.learner.lora import (
    ADAPTER,
    adapter_parameters,
    add_adapter,
    check_base,
    has_adapter,
    is_adapter,
    merged_parameters,
    write_adapter,
)
from agentrl.learner.models import PolicyModel, load_model
from agentrl.learner.parameters import WHOLE, Parameters, copied
from agentrl.learner.plan import LearnerConfig
from agentrl.learner.ranks import Ranks
from agentrl.learner.saved import BACKEND_KEY, NUM_LEARNERS, join_slices, read_tensors
from agentrl.learner.settings import LearnerSettings


def checkpoint_names(model: Any, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model under the names, and in the pieces, in which checkpoints and inference engines have them."""
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in parameters:
        yield from revert_weight_conversion(model, {name: tensor}).items()


def save_pretrained(model: Any, parameters: Iterable[tuple[str, Tensor]], tokenizer: Any, path: str | Path, ranks: Ranks) -> None:
    """Write a Hugging Face directory: complete under its name, in place of what was there, or not at all.

    Every rank calls and iterates over the weights, given as by `Parameters.named`; the first writes. `model` gives the configuration.

    Raises:
        CheckpointError: If it cannot be written; what was there before is intact.
    """

    def write(state: dict[str, Tensor], folder: Path) -> None:
        with _unwrapped():
            model.save_pretrained(folder, state_dict={**state, **_buffers(model)})
        copy_processor(model, folder)

    _save(parameters, write, tokenizer, path, ranks)


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Within the block, accelerate takes a model as it is; to see that it is not wrapped, it would import an installed DeepSpeed."""
    from accelerate.utils import other

    is_available = other.is_deepspeed_available
    other.is_deepspeed_available = lambda: False
    try:
        yield
    finally:
        other.is_deepspeed_available = is_available


def save_adapter(model: Any, parameters: Iterable[tuple[str, Tensor]], tokenizer: Any, path: str | Path, ranks: Ranks) -> None:
    """Write the adapter alone, in the form of peft, with the tokenizer beside it; arguments and errors as in `save_pretrained`."""
    head = model.peft_config[ADAPTER].modules_to_save or ()
    _save(adapter_parameters(parameters, head), lambda state, folder: write_adapter(model, state, folder), tokenizer, path, ranks)


def _save(
    parameters: Iterable[tuple[str, Tensor]],
    write: Callable[[dict[str, Tensor], Path], None],
    tokenizer: Any,
    path: str | Path,
    ranks: Ranks,
) -> None:
    state = copied(parameters, keep=ranks.first)
    if ranks.first:
        target = Path(path)
        for left in target.parent.glob(f".{target.name}.*.tmp"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with quiet_transformers():
                write(state, temporary)
                tokenizer.save_pretrained(temporary)
            swap_directory(temporary, target)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"the model cannot be written to {target}: {write_problem(error, target)}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            ranks.barrier()
    else:
        ranks.barrier()


def _buffers(model: Any) -> dict[str, Tensor]:
    """Persistent buffers, which every rank has whole."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}


class WeightAverage:
    """``average = decay * average + (1 - decay) * weights`` after each step, in float32; of a model with an adapter, of that alone.

    Where ranks hold parts of parameters, each averages its own; otherwise the first rank averages all. With `offload` the
    average is in CPU memory.
    """

    def __init__(self, model: nn.Module, decay: float, ranks: Ranks, parameters: Parameters, *, offload: bool = False) -> None:
        self._model, self._decay, self._ranks, self._parameters = model, decay, ranks, parameters
        device = torch.device("cpu") if offload else ranks.device
        # bfloat16 would round a step's change, a share of 1 - decay, to nothing.
        self._parts = {name: part.to(device, torch.float32, copy=True) for name, part in self._held()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the current weights."""
        for name, part in self._held():
            average = self._parts[name]
            average.lerp_(part.to(average.device, torch.float32), 1.0 - self._decay)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole averaged parameters under their names in the model; a collective operation where ranks hold parts."""
        for name, parameter in self._averaged():
            if self._parameters.part(parameter) is not None:
                yield name, self._gather(self._parts[name].to(self._ranks.device), parameter).to(parameter.dtype)
            elif self._ranks.first:
                yield name, self._parts[name].to(parameter.dtype)

    def state(self) -> dict[str, Tensor]:
        """The parts that this rank holds, by the parameter's name."""
        return self._parts

    def restore(self, ranks: Sequence[Mapping[str, Tensor]]) -> None:
        """Continue from what `state` gave on all ranks, which may have been others than now."""
        for name, parameter in self._averaged():
            if name not in self._parts:
                continue
            part, flat = self._parts[name].view(-1), saved_average(ranks, name, self._parameters.shape(parameter)).flatten()
            divided = self._parameters.part(parameter) is not None
            first = min(part.numel() * self._ranks.rank, flat.numel()) if divided else 0
            share = flat[first : first + part.numel()]
            part[: share.numel()].copy_(share)

    def _averaged(self) -> Iterator[tuple[str, nn.Parameter]]:
        adapted = has_adapter(self._model)
        return ((name, parameter) for name, parameter in self._model.named_parameters() if parameter.requires_grad or not adapted)

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._averaged():
            part = self._parameters.part(parameter)
            if part is None and self._ranks.first:
                part = parameter.data
            if part is not None:
                yield name, part.detach()

    def _gather(self, part: Tensor, parameter: nn.Parameter) -> Tensor:
        """Parts are equally long slices of the flattened parameter, in the order of ranks, padded at the end."""
        shape = self._parameters.shape(parameter)
        slices = [torch.empty_like(part) for _ in range(self._ranks.world_size)]
        dist.all_gather(slices, part.contiguous())
        return join_slices(slices, shape)


def saved_average(ranks: Sequence[Mapping[str, Tensor]], name: str, shape: torch.Size) -> Tensor:
    """A whole averaged parameter, from what `WeightAverage.state` gave on all ranks."""
    return join_slices([parts[name] for parts in ranks if name in parts], shape)


DType: TypeAlias = Literal["float32", "bfloat16"]
Lookup: TypeAlias = Callable[[str, torch.Size], Tensor]
ALONE = Ranks(0, 1, torch.device("cpu"))


def export_checkpoint(
    folder: Path, settings: LearnerSettings, target: Path, *, average: bool = False, dtype: DType = "float32", merge: bool = False
) -> int:
    """Write the policy of a checkpoint as a Hugging Face directory, and return the number of parameters in it.

    The directory is complete under its name, or not there. The initial model is loaded for everything that training leaves alone:
    configuration, generation settings, remote code. `folder` is the learner's part of the checkpoint; `average` takes the moving average
    instead of the weights; the optimizer's own weights, which `dtype` replaces, are float32. Of a run with ``--lora-rank`` the adapter is
    written, or with `merge` the initial model with the adapter merged into it.

    Raises:
        ConfigError: If the checkpoint has no moving average.
        CheckpointError: If it cannot be read, is of another model, or the directory cannot be written.
    """
    check_base(read_tensors(folder / "rank-0.pt").get("base"), settings.model)
    model, tokenizer = _initial(settings, dtype)
    with _as_checkpoint_error(folder, settings.model):
        lookup = _averages(folder) if average else _weights(folder, model, settings.learner)
        if settings.lora.lora_rank:
            return _write_adapted(model, lookup, tokenizer, target, merge=merge)
        save_pretrained(model, _parameters(model, lookup), tokenizer, target, ALONE)
    return sum(parameter.numel() for parameter in model.parameters())


def _initial(settings: LearnerSettings, dtype: DType) -> tuple[Any, Any]:
    """The initial model, with an adapter that changes nothing if the run has one, and the tokenizer."""
    model = load_model(replace(settings, learner=replace(settings.learner, learner_dtype=dtype)), trained=False)
    if settings.lora.lora_rank:
        add_adapter(model, settings.lora, base=settings.model)
    return model, load_tokenizer(settings.model, trust_remote_code=settings.trust_remote_code)


@torch.no_grad()
def _write_adapted(model: Any, lookup: Lookup, tokenizer: Any, target: Path, *, merge: bool) -> int:
    """Write a model with the adapter that `lookup` gives: the adapter alone, or the model with it merged in."""
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.copy_(lookup(name, parameter.shape))
    if merge:
        save_pretrained(model, merged_parameters(model), tokenizer, target, ALONE)
    else:
        save_adapter(model, WHOLE.named(model), tokenizer, target, ALONE)
    return sum(parameter.numel() for name, parameter in model.named_parameters() if is_adapter(name) != merge)


@contextmanager
def _as_checkpoint_error(folder: Path, model: str) -> Iterator[None]:
    try:
        yield
    except AgentRLError:
        raise
    except (KeyError, ValueError, RuntimeError) as error:  # torch reports a shape that does not fit as RuntimeError
        raise CheckpointError(f"{folder} does not fit {model}: {type(error).__name__}: {error}") from error


def _weights(folder: Path, model: torch.nn.Module, settings: LearnerConfig) -> Lookup:
    policy, layout = PolicyModel(model), read_tensors(folder / "rank-0.pt")["layout"]
    saved = backend_of(layout.get(BACKEND_KEY, DEEPSPEED)).saved(folder / "policy", layout, policy, settings)
    for name, buffer in policy.named_buffers():
        if name in saved.buffers:
            buffer.copy_(saved.buffers[name])
    return lambda name, shape: saved[f"model.{name}"].view(shape)


def _averages(folder: Path) -> Lookup:
    first = read_tensors(folder / "rank-0.pt")
    if first["average"] is None:
        raise ConfigError("--ema", True, "there is no moving average in this checkpoint", "Runs with --ema-decay keep one.")
    others = [read_tensors(folder / f"rank-{rank}.pt") for rank in range(1, first["layout"][NUM_LEARNERS])]
    parts = [rank["average"] for rank in (first, *others)]
    return lambda name, shape: saved_average(parts, name, shape)


def _parameters(model: torch.nn.Module, lookup: Lookup) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, lookup(name, parameter.shape).to(parameter.dtype)
