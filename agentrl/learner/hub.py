"""A checkpoint as a Hugging Face directory, in one process and without starting DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from agentrl.core.errors import AgentRLError, CheckpointError, ConfigError
from agentrl.learner.average import saved_average
from agentrl.learner.checkpoint import NUM_LEARNERS, saved_engine
from agentrl.learner.export import save_pretrained
from agentrl.learner.models import load_model
from agentrl.learner.policy import PolicyModel
from agentrl.learner.ranks import Ranks
from agentrl.learner.saved import read_tensors
from agentrl.learner.settings import LearnerSettings
from agentrl.rollout.chat import load_tokenizer

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
