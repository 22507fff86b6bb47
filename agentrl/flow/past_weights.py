"""Earlier weights of a run that agents are played by: RUN_DIR/partners, a Hugging Face directory each."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import anyio

from agentrl.core.files import replace_directory, temporary_directory
from agentrl.core.paths import past_folder
from agentrl.core.protocols import Learner
from agentrl.flow.state import SafePoint


class PastWeights:
    """Writes the policy into `folder` after each `every` steps; every rollout worker must see the folder.

    Weights of a step are written before the next step is trained, and played against from the next version on. So the choice that a group
    has depends on its version alone, and a resumed run makes the choices of an uninterrupted one.
    """

    def __init__(self, folder: Path, learner: Learner, *, every: int) -> None:
        self._folder, self._learner, self._every = folder, learner, every

    async def __call__(self, point: SafePoint) -> None:
        """Write the weights of a step if they are to be kept."""
        await self.keep(point.step)

    async def keep(self, step: int) -> None:
        """Write the weights that the learner holds after `step` steps, if they are to be kept; those of step 0 are the model's own.

        Raises:
            CheckpointError: If they cannot be written.
        """
        if not step or step % self._every:
            return
        target = past_folder(self._folder, step)
        temporary = await asyncio.to_thread(temporary_directory, target)
        with anyio.CancelScope(shield=True):  # the learner would go on writing
            try:
                await self._learner.save_model(str(temporary))
                await asyncio.to_thread(replace_directory, temporary, target)
            finally:
                # The learner may have written its moving average beside the model, and nobody plays against that.
                for left in (temporary, temporary.with_name(f"{temporary.name}-ema")):
                    shutil.rmtree(left, ignore_errors=True)
