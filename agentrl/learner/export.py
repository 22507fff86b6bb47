"""Weights on their way out: named tensors for publication, a Hugging Face directory for people."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from agentrl.core.errors import AgentRLError, CheckpointError, ConfigError
from agentrl.core.files import swap_directory
from agentrl.core.tokenizers import load_tokenizer
from agentrl.learner.average import saved_average
from agentrl.learner.checkpoint import NUM_LEARNERS, saved_engine
from agentrl.learner.engine import gathered_parameter
from agentrl.learner.models import PolicyModel, load_model, quiet_transformers
from agentrl.learner.ranks import Ranks
from agentrl.learner.saved import read_tensors
from agentrl.learner.settings import LearnerSettings


def whole_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under its name in the model, one at a time, tied ones once.

    Under ZeRO-3 gathering a parameter is a collective operation: every rank iterates to the end. A tensor is valid
    until the next one is asked for.
    """
    for name, parameter in model.named_parameters():
        with gathered_parameter(parameter) as tensor:
            yield name, tensor


def checkpoint_names(model: Any, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same weights under the names, and in the pieces, in which checkpoints and inference engines have them.

    Args:
        model: The transformers model whose parameters they are.
        parameters: As from `whole_parameters`.
    """
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in parameters:
        yield from revert_weight_conversion(model, {name: tensor}).items()


def save_pretrained(model: Any, parameters: Iterable[tuple[str, Tensor]], tokenizer: Any, path: str | Path, ranks: Ranks) -> None:
    """Write a Hugging Face directory: complete under its name, or not there.

    Args:
        model: A transformers model: gives the configuration.
        parameters: The weights, as from `whole_parameters`; every rank calls and iterates.
        tokenizer: Written beside it.
        path: The directory; replaced if it exists.
        ranks: The first writes, all gather.

    Raises:
        CheckpointError: If it cannot be written; what was there before is intact.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in parameters:
        if ranks.first:
            state[name] = tensor.detach().to("cpu", copy=True)
    if ranks.first:
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with quiet_transformers():
                model.save_pretrained(temporary, state_dict={**state, **_buffers(model)})
                tokenizer.save_pretrained(temporary)
            swap_directory(temporary, target)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"the model cannot be written to {target}: {error}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            ranks.barrier()
    else:
        ranks.barrier()


def _buffers(model: Any) -> dict[str, Tensor]:
    """Persistent buffers, which ZeRO leaves whole."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}


DType: TypeAlias = Literal["float32", "bfloat16"]
Lookup: TypeAlias = Callable[[str, torch.Size], Tensor]
NO_PARTS = {"zero_optimization": {"stage": 0}}


def export_checkpoint(folder: Path, settings: LearnerSettings, target: Path, *, average: bool, dtype: DType) -> int:
    """Write the policy of a checkpoint as a Hugging Face directory: complete under its name, or not there.

    The initial model is loaded for everything that training leaves alone: configuration, generation settings, remote code.

    Args:
        folder: The learner's part of a checkpoint.
        settings: Of the run.
        target: The directory to write.
        average: Whether to take the moving average instead of the weights.
        dtype: Type to write them in; the optimizer's own are float32.

    Returns:
        Number of parameters.

    Raises:
        ConfigError: If the checkpoint has no moving average.
        CheckpointError: If it cannot be read, is of another model, or the directory cannot be written.
    """
    model = load_model(replace(settings, learner=replace(settings.learner, learner_dtype=dtype)), NO_PARTS, trained=False)
    tokenizer = load_tokenizer(settings.model, trust_remote_code=settings.trust_remote_code)
    try:
        lookup = _averages(folder) if average else _weights(folder, model, settings.learner.weight_decay)
        parameters = _parameters(model, lookup)
        save_pretrained(model, parameters, tokenizer, target, Ranks(0, 1, torch.device("cpu")))
    except AgentRLError:
        raise
    except (KeyError, ValueError, RuntimeError) as error:  # torch reports a shape that does not fit as RuntimeError
        raise CheckpointError(f"{folder} does not fit {settings.model}: {type(error).__name__}: {error}") from error
    return sum(parameter.numel() for parameter in model.parameters())


def _weights(folder: Path, model: torch.nn.Module, weight_decay: float) -> Lookup:
    policy, layout = PolicyModel(model), read_tensors(folder / "rank-0.pt")["layout"]
    saved = saved_engine(folder / "policy", layout, policy, weight_decay)
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
