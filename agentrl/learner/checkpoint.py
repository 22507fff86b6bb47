"""A learner rank's state on disk: everything that decides its next steps.

DeepSpeed writes each engine's weights and optimizer under ``policy/`` and ``critic/``, in parts under ZeRO. Beside them
are ``reference.pt`` (once the reference may have been reset) and one ``rank-N.pt`` per rank with what is small. All of
these are torch files; they are read with ``weights_only``, so that reading them runs no code, DeepSpeed's included.
The caller makes the directory appear and disappear as a whole, see `agentrl.core.files`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from agentrl.core.errors import AgentRLError, CheckpointError
from agentrl.learner.engine import TrainEngine, whole

if TYPE_CHECKING:
    from agentrl.learner.state import LearnerState

TAG = "state"


def save_checkpoint(state: LearnerState, path: Path, step: int) -> None:
    """Write the state of all ranks into `path`; collective.

    Args:
        state: Of this rank.
        path: An existing directory that every rank sees.
        step: Steps done.

    Raises:
        CheckpointError: If this rank cannot write its part.
    """
    with _as_checkpoint_error("written to", path):
        for name, engine in _engines(state):
            engine.engine.save_checkpoint(str(path / name), tag=TAG, save_latest=False)
        if _reference_changes(state):
            _save_reference(state.models.reference, path / "reference.pt", first=state.ranks.first)
        torch.save(_rank_state(state, step), path / f"rank-{state.ranks.rank}.pt")
    state.ranks.barrier()


def load_checkpoint(state: LearnerState, path: Path) -> int:
    """Restore what `save_checkpoint` wrote, into models that have not been trained; collective.

    Returns:
        Steps done.

    Raises:
        CheckpointError: If it cannot be read, or was written with another number of ranks or ZeRO stage.
    """
    with _as_checkpoint_error("read from", path):
        saved = torch.load(path / "rank-0.pt", weights_only=True)
        _check_layout(saved["layout"], _layout(state), path)
        saved = torch.load(path / f"rank-{state.ranks.rank}.pt", weights_only=True)
        for name, engine in _engines(state):
            _load_engine(engine, path / name)
            engine.skipped_in_a_row = saved["skipped"][name]
        if _reference_changes(state):
            _load_reference(state.models.reference, path / "reference.pt")
        state.kl = replace(state.kl, coefficient=saved["kl_coefficient"])
        if state.average is not None:
            state.average.restore(saved["average"])
        _restore_generators(saved["generators"])
    state.ranks.barrier()
    return int(saved["step"])


def _engines(state: LearnerState) -> list[tuple[str, TrainEngine]]:
    engines = [("policy", state.models.policy), ("critic", state.models.critic)]
    return [(name, engine) for name, engine in engines if engine is not None]


def _reference_changes(state: LearnerState) -> bool:
    return state.models.reference is not None and state.settings.algo.ref_reset_every > 0


def _layout(state: LearnerState) -> dict[str, int]:
    """What the files of a checkpoint depend on."""
    return {"--num-learners": state.ranks.world_size, "--zero-stage": state.settings.learner.zero_stage}


def _check_layout(saved: dict[str, int], asked: dict[str, int], path: Path) -> None:
    for flag, value in saved.items():
        if asked[flag] != value:
            raise CheckpointError(f"{path} was written with {flag} {value} and cannot be read with {flag} {asked[flag]}")


def _rank_state(state: LearnerState, step: int) -> dict[str, Any]:
    return {
        "step": step,
        "layout": _layout(state),
        "skipped": {name: engine.skipped_in_a_row for name, engine in _engines(state)},
        "kl_coefficient": state.kl.coefficient,
        "average": None if state.average is None else state.average.state(),
        "generators": _generators(),
    }


def _generators() -> dict[str, Any]:
    """States of every generator that a model or a library may draw from, in types that ``weights_only`` accepts."""
    words: Any = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate(), "numpy": (words[0], words[1].tolist(), *words[2:])}


def _restore_generators(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(states["numpy"])


def _save_reference(reference: Any, path: Path, *, first: bool) -> None:
    """Whole weights, gathered by all ranks and written by the first."""
    weights = {}
    for name, parameter in reference.named_parameters():
        with whole(parameter) as tensor:
            if first:
                weights[name] = tensor.detach().to("cpu", copy=True)
    if first:
        torch.save(weights, path)


@torch.no_grad()
def _load_reference(reference: Any, path: Path) -> None:
    weights = torch.load(path, weights_only=True, mmap=True)
    parameters: dict[str, nn.Parameter] = dict(reference.named_parameters())
    for name, parameter in parameters.items():
        with whole(parameter, modify=True) as tensor:
            tensor.copy_(weights[name])


def _load_engine(engine: TrainEngine, path: Path) -> None:
    with _only_data():
        found, _ = engine.engine.load_checkpoint(str(path), tag=TAG)
    if found is None:
        raise CheckpointError(f"DeepSpeed finds no checkpoint in {path}")


@contextmanager
def _only_data() -> Iterator[None]:
    """Make DeepSpeed's calls of ``torch.load`` refuse pickled code; it asks for the contrary, torch's own switch overrules it."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
            yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _as_checkpoint_error(what: str, path: Path) -> Iterator[None]:
    """Turn what torch, DeepSpeed and the file system raise into the one error that callers know."""
    try:
        yield
    except AgentRLError:
        raise
    except Exception as error:  # torch reports a full disk as RuntimeError, a broken file as one of many
        raise CheckpointError(f"the learner's state cannot be {what} {path}: {type(error).__name__}: {error}") from error
