"""One learner rank: a plain class with synchronous methods, run as it is or inside an actor."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.core.errors import LearnerError
from agentrl.core.protocols import TrainResult, WeightUpdate
from agentrl.core.types import Group
from agentrl.learner.settings import LearnerSettings

if TYPE_CHECKING:
    from agentrl.learner.state import LearnerState
    from agentrl.weights.sender import WeightSender


class LearnerRank:
    """Trains the policy together with the other ranks.

    Every method but the constructor is collective: all ranks call it, with the same arguments but for the rank.
    Nothing heavy is imported before `start`.

    Args:
        settings: The same on every rank.
        sender: Publishes weights; on the first rank, or on each if it says so.
    """

    def __init__(self, settings: LearnerSettings, sender: WeightSender) -> None:
        self.settings, self._sender = settings, sender
        self._state: LearnerState | None = None

    def start(self, rank: int, world_size: int, master_port: int, master_addr: str = "127.0.0.1") -> None:
        """Meet the other ranks and load the models.

        Args:
            rank: This rank, from 0.
            world_size: Number of ranks.
            master_port: Port on which rank 0 is met; not used by a single rank.
            master_addr: Address of rank 0.
        """
        from agentrl.learner.ranks import join

        device = self.settings.device
        ranks = join(rank, world_size, master_port=master_port, master_addr=master_addr, device=device, timeout_s=JOIN_TIMEOUT_S)
        # DeepSpeed looks at the environment that `join` sets up when it is imported.
        from agentrl.learner.state import load_state

        try:
            self._state = load_state(self.settings, ranks)
        except BaseException:
            ranks.leave()
            raise

    def train(self, step: int, *groups: Group) -> TrainResult:
        """One step over these groups; afterwards the weights are version ``step + 1``.

        Args:
            step: Version of the weights the step starts from.
            groups: All groups of the step, oldest first, on every rank.

        Returns:
            Metrics over all ranks; the same on each.

        Raises:
            BatchError: If nothing in the groups can be trained.
            NonFiniteError: If too many updates in a row had a gradient that is not finite.
        """
        begin = time.perf_counter()
        metrics = self._started.train(step, groups)
        return TrainResult(metrics=metrics, seconds=time.perf_counter() - begin)

    def export_weights(self, version: int) -> WeightUpdate | None:
        """Publish the current weights as `version`.

        Returns:
            On the first rank, how engines get them; elsewhere `None` or the same.
        """
        state = self._started
        weights = state.named_weights()
        if state.ranks.first or self._sender.every_rank:
            return self._sender.send(weights, version)
        for _ in weights:
            pass
        return None

    def save_model(self, path: str) -> None:
        """Write the policy as a Hugging Face directory, atomically, and its moving average beside it if one is kept.

        Raises:
            CheckpointError: If it cannot be written.
        """
        self._started.save(path)

    def save_checkpoint(self, path: str, step: int) -> None:
        """Write everything that decides the next steps into an existing directory, which every rank must see.

        Args:
            path: The directory; the caller makes it appear as a whole.
            step: Steps done.

        Raises:
            CheckpointError: If it cannot be written.
        """
        from agentrl.learner.checkpoint import save_checkpoint

        save_checkpoint(self._started, Path(path), step)

    def load_checkpoint(self, path: str) -> int:
        """Continue from what `save_checkpoint` wrote, with any number of ranks and ZeRO stage; only before the first step.

        Returns:
            Steps done.

        Raises:
            CheckpointError: If it cannot be read.
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
"""How long a collective operation waits for the other ranks; loading a large model on one of them may take that long."""
