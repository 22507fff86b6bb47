"""A learner rank's state on disk: everything that decides its next steps.

The back-end writes each engine's weights and optimizer under ``policy/`` and ``critic/``, in parts under ZeRO. Beside them
are ``reference.pt`` (once the reference may have been reset) and one ``rank-N.pt`` per rank with what is small. All of
these are torch files; they are read with ``weights_only``, so that reading them runs no code, DeepSpeed's included. With as
many ranks and the ZeRO stage of the save, each rank reads its own part; otherwise it looks up what it needs in those of all.
The caller makes the directory appear and disappear as a whole, see `agentrl.core.files`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from agentrl.core.disk import write_problem
from agentrl.core.errors import AgentRLError, CheckpointError
from agentrl.core.types import derive_seed
from agentrl.learner.backends import DEEPSPEED
from agentrl.learner.engine import TrainEngine, backend_of
from agentrl.learner.lora import base_of, check_base
from agentrl.learner.parameters import Parameters, copied
from agentrl.learner.saved import BACKEND_KEY, NUM_LEARNERS, read_tensors
from agentrl.learner.state import LearnerState

WRITTEN = "written to"
PARTS = "--learner-tensor-parallel"


def generator_states() -> dict[str, Any]:
    """States of every generator that a model or a library may draw from, in types that ``weights_only`` accepts."""
    words: Any = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate(), "numpy": (words[0], words[1].tolist(), *words[2:])}


def restore_generators(states: Mapping[str, Any]) -> None:
    """Go on from what `generator_states` returned."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(states["numpy"])


def save_checkpoint(state: LearnerState, path: Path, step: int) -> list[Path]:
    """Write the state of all ranks after so many steps into an existing directory, which every rank sees; collective.

    Returns:
        The files that this rank wrote.

    Raises:
        CheckpointError: If this rank cannot write its part.
    """
    with _as_checkpoint_error(WRITTEN, path):
        written = [path / f"rank-{state.ranks.rank}.pt"]
        for name, engine in _engines(state):
            written += engine.save(path / name)
        if _reference_changes(state):
            _save_reference(state.models.reference, path / "reference.pt", state.backend.parameters, first=state.ranks.first)
            written += [path / "reference.pt"] if state.ranks.first else []
        torch.save(_rank_state(state, step), written[0])
    state.ranks.barrier()
    return written


def load_checkpoint(state: LearnerState, path: Path) -> int:
    """Restore what `save_checkpoint` wrote, into models that have not been trained, and return the steps done; collective.

    The back-end, the number of ranks and the ZeRO stage may be others than those of the save.

    Raises:
        CheckpointError: If it cannot be read, or is of another model.
    """
    with _as_checkpoint_error("read from", path):
        ranks = [read_tensors(path / "rank-0.pt")]
        layout = ranks[0]["layout"]
        check_base(ranks[0].get("base"), state.settings.model)
        ranks += [read_tensors(path / f"rank-{rank}.pt") for rank in range(1, layout[NUM_LEARNERS])]
        for name, engine in _engines(state):
            if layout == _layout(state):
                engine.load(path / name)
            elif state.ranks.tensor_parallel > 1:
                raise CheckpointError(f"layers are whole in {path}, or in other parts; leave out {PARTS}, or resume as the run began")
            elif (optimizer := state.settings.learner.optimizer) != "adamw":
                saved = ", ".join(f"{name} {value}" for name, value in layout.items())
                raise CheckpointError(f"the state of --optimizer {optimizer} is of {saved}; resume with the same")
            else:
                wrote = backend_of(layout.get(BACKEND_KEY, DEEPSPEED))
                engine.restore(wrote.saved(path / name, layout, engine.module, state.settings.learner))
            engine.skipped_in_a_row = ranks[0]["skipped"][name]
        if _reference_changes(state):
            _load_reference(state.models.reference, path / "reference.pt", state.backend.parameters)
        state.kl = replace(state.kl, coefficient=ranks[0]["kl_coefficient"])
        state.entropy = replace(state.entropy, **ranks[0].get("entropy", {}))
        if state.average is not None:
            state.average.restore([rank["average"] for rank in ranks])
        _restore_generators(state, ranks)
    state.ranks.barrier()
    return int(ranks[0]["step"])


def _engines(state: LearnerState) -> list[tuple[str, TrainEngine]]:
    engines = [("policy", state.models.policy), ("critic", state.models.critic)]
    return [(name, engine) for name, engine in engines if engine is not None]


def _reference_changes(state: LearnerState) -> bool:
    return state.models.reference is not None and state.settings.algo.ref_reset_every > 0


def _layout(state: LearnerState) -> dict[str, Any]:
    """Return the facts that the files of a checkpoint depend on."""
    return state.backend.layout(state.settings.learner, state.ranks)


def _rank_state(state: LearnerState, step: int) -> dict[str, Any]:
    return {
        "step": step,
        "layout": _layout(state),
        "base": base_of(state.policy, state.settings.model),
        "skipped": {name: engine.skipped_in_a_row for name, engine in _engines(state)},
        "kl_coefficient": state.kl.coefficient,
        "entropy": {"coefficient": state.entropy.coefficient, "above": state.entropy.above},
        "average": None if state.average is None else state.average.state(),
        "generators": generator_states(),
    }


def _restore_generators(state: LearnerState, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Restore the generators of this rank; a rank that was not there before seeds them by the run's seed, its number and the step."""
    rank = state.ranks.rank
    if rank >= len(ranks):
        seed = derive_seed(state.settings.seed, "learner", rank, ranks[0]["step"])
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return
    restore_generators(ranks[rank]["generators"])


def _save_reference(reference: Any, path: Path, parameters: Parameters, *, first: bool) -> None:
    """Whole weights, gathered by all ranks and written by the first."""
    weights = copied(parameters.named(_bare(reference)), keep=first)
    if first:
        torch.save(weights, path)


@torch.no_grad()
def _load_reference(reference: Any, path: Path, parameters: Parameters) -> None:
    weights = torch.load(path, weights_only=True, mmap=True)
    own: dict[str, nn.Parameter] = dict(_bare(reference).named_parameters())
    for name, parameter in own.items():
        with parameters.gathered(parameter, modify=True) as tensor:
            tensor.copy_(weights[name])


def _bare(reference: Any) -> Any:
    """The module itself, which a back-end may have wrapped, so that names do not depend on it."""
    return getattr(reference, "module", reference)


@contextmanager
def _as_checkpoint_error(what: str, path: Path) -> Iterator[None]:
    """Turn what torch, DeepSpeed and the file system raise into the one error that callers know."""
    try:
        yield
    except AgentRLError:
        raise
    except Exception as error:  # torch reports a full disk as RuntimeError, a broken file as one of many
        told = write_problem(error, path) if what == WRITTEN else str(error)
        raise CheckpointError(f"the learner's state cannot be {what} {path}: {type(error).__name__}: {told}") from error
