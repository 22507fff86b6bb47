"""One learner rank: a plain class with synchronous methods, run as it is or inside an actor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.core.disk import write_problem
from agentrl.core.errors import CheckpointError, LearnerError
from agentrl.core.manifest import FileEntry, flush_files
from agentrl.core.process import LOOPBACK
from agentrl.core.protocols import Membership, TrainResult, WeightUpdate
from agentrl.core.types import Group
from agentrl.learner.settings import LearnerSettings

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.learner.state import LearnerState
    from agentrl.weights.sender import WeightSender


class Weights:
    """The current weights, as often as they are asked for."""

    def __init__(self, named_weights: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        self._named_weights = named_weights

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._named_weights()


class LearnerRank:
    """Trains the policy together with the other ranks.

    Every method but the constructor and `flush_checkpoint` is collective: all ranks call it, with the same arguments but for the rank.
    Nothing heavy is imported before `start`.
    """

    def __init__(self, settings: LearnerSettings, sender: WeightSender) -> None:
        self.settings, self._sender = settings, sender
        self._state: LearnerState | None = None
        self._written: list[Path] = []
        self._verified = -1  # epoch of the membership whose engines were compared last

    def start(
        self, rank: int, world_size: int, master_port: int, master_addr: str = LOOPBACK, place: tuple[int, int] | None = None
    ) -> None:
        """Meet the other ranks, at a port of rank 0 unless there is one only, and load the models.

        `place` is the number of this rank among those of its machine, and how many those are; by default all are on one machine.
        """
        from agentrl.learner.engine import join

        ranks = join(
            self.settings.learner.learner_backend,
            rank,
            world_size,
            master_port=master_port,
            master_addr=master_addr,
            place=place or (rank, world_size),
            device=self.settings.device,
            timeout_s=JOIN_TIMEOUT_S,
            sequence_parallel=self.settings.learner.sequence_parallel,
            tensor_parallel=self.settings.learner.learner_tensor_parallel,
        )
        # A back-end may look at the environment that `join` sets up when it is imported, as DeepSpeed does.
        from agentrl.learner.state import load_state

        try:
            self._state = load_state(self.settings, ranks)
        except BaseException:
            ranks.leave()
            raise

    def train(self, step: int, *groups: Group) -> TrainResult:
        """One step over all its groups, oldest first, given to every rank; afterwards the weights are version ``step + 1``.

        The metrics are those over all ranks.

        Raises:
            BatchError: If nothing in the groups can be trained.
            NonFiniteError: If too many updates in a row had a gradient that is not finite.
        """
        begin = time.perf_counter()
        self._sender.settle()
        metrics = self._started.train(step, groups)
        return TrainResult(metrics=metrics, seconds=time.perf_counter() - begin)

    def export_weights(self, version: int, members: Membership | None = None) -> WeightUpdate | None:
        """Publish the current weights as `version`; return how engines get them from this rank, or `None`."""
        state = self._started
        weights = Weights(state.named_weights)
        digests = self._digests(weights, version, members)
        if state.ranks.first or self._sender.every_rank:
            update = self._sender.send(weights, version, members)
            return replace(update, payload={**update.payload, **digests}) if update is not None else None
        for _ in weights:
            pass
        return None

    def _digests(self, weights: Weights, version: int, members: Membership | None) -> dict[str, Any]:
        """Return what engines compare their weights with after this publication; nothing if they do not, and on other ranks than the first.

        They do in the first publication to any membership, and then every `verify_every` steps.
        """
        every, epoch = self.settings.verify_every, members.epoch if members is not None else 0
        if not every or (epoch == self._verified and version % every):
            return {}
        self._sender.abandon("the weights are sent again")  # a transfer goes over the parameters too, on a thread of its own
        self._verified = epoch
        if self._started.ranks.first:
            from agentrl.weights.digests import DIGESTS, expected

            return {DIGESTS: expected(weights, self.settings.engine_dtype)}
        for _ in weights:
            pass
        return {}

    def abandon_weights(self, reason: str) -> None:
        """Give up a transfer to engines that is under way, and wait until this rank's part of it has ended."""
        self._sender.abandon(reason)

    def offload(self, keep_weights: bool) -> None:
        """Move what only a step needs from the GPU to CPU memory, and the weights too unless they are kept."""
        self._sender.settle()
        self._started.offload(keep_weights=keep_weights)

    def reload(self) -> None:
        """Undo `offload`."""
        self._started.reload()

    def digests(self) -> list[int]:
        """Return the digests of the policy's weights, and of this rank's master weights and optimizer."""
        return self._started.digests()

    def save_model(self, path: str) -> None:
        """Write the policy as a Hugging Face directory, atomically, and its moving average beside it if one is kept."""
        self._sender.settle()
        self._started.save(path)

    def save_checkpoint(self, path: str, step: int) -> None:
        """Write everything that decides the steps after `step` into an existing directory, which every rank must see."""
        from agentrl.learner.checkpoint import save_checkpoint

        self._sender.settle()
        self._written = save_checkpoint(self._started, Path(path), step)

    def flush_checkpoint(self, path: str) -> dict[str, FileEntry]:
        """Flush what this rank wrote with the last `save_checkpoint`, and return sizes and hashes by name within `path`.

        Not collective; it may run on another thread while this one trains.

        Raises:
            CheckpointError: If a file cannot be flushed or read.
        """
        try:
            return flush_files(Path(path), [file.relative_to(path).as_posix() for file in self._written])
        except OSError as error:
            raise CheckpointError(f"the learner's state cannot be written to {path}: {write_problem(error, Path(path))}") from error

    def load_checkpoint(self, path: str) -> int:
        """Continue from what `save_checkpoint` wrote, and return the steps done; only before the first step.

        The number of ranks and the ZeRO stage may have changed.
        """
        from agentrl.learner.checkpoint import load_checkpoint

        return load_checkpoint(self._started, Path(path))

    def close(self) -> None:
        """Release models, process group and what is held for engines; safe to call twice."""
        state, self._state = self._state, None
        self._sender.close()
        if state is not None:
            state.close()

    @property
    def _started(self) -> LearnerState:
        if self._state is None:
            raise LearnerError("the learner rank has not been started, or is closed; call start() first")
        return self._state


JOIN_TIMEOUT_S = 1800.0
"""Seconds that a collective operation waits for the other ranks; loading a large model on one of them may take that long."""
