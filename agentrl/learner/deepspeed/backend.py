"""DeepSpeed as a back-end of the learner. Import it after `agentrl.learner.deepspeed.ranks.join`: DeepSpeed reads the environment then."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agentrl.learner.attention import Kernel
from agentrl.learner.deepspeed.engine import ZeroEngine, partition_frozen
from agentrl.learner.deepspeed.loading import loading, register_ulysses, tile_mlps
from agentrl.learner.deepspeed.parameters import PARAMETERS
from agentrl.learner.deepspeed.saved import DIVIDED, ZERO_STAGE, saved_engine
from agentrl.learner.engine import Backend, TrainEngine
from agentrl.learner.plan import LearnerConfig
from agentrl.learner.ranks import Ranks
from agentrl.learner.saved import NUM_LEARNERS, Layout, SavedState
from agentrl.learner.sequence import SequenceGroup
from agentrl.learner.settings import LearnerSettings


class DeepSpeedBackend(Backend):
    """DeepSpeed on any number of ranks."""

    parameters = PARAMETERS

    def train(self, module: nn.Module, config: LearnerConfig, ranks: Ranks, *, bf16: bool) -> TrainEngine:
        """Return the module with its optimizer."""
        return ZeroEngine(module, config, ranks, bf16=bf16)

    def layout(self, config: LearnerConfig, ranks: Ranks) -> dict[str, Any]:
        """Return the facts that the files of a checkpoint depend on."""
        layout = {NUM_LEARNERS: ranks.world_size, ZERO_STAGE: config.zero_stage}
        return layout | ({DIVIDED: ranks.tensor_parallel} if ranks.tensor_parallel > 1 else {})

    def saved(self, folder: Path, layout: Layout, module: nn.Module, config: LearnerConfig) -> SavedState:
        """Return the state of a trained model, from the parts of all ranks."""
        return saved_engine(folder, layout, module, config)

    def loading(self, settings: LearnerSettings, *, trained: bool) -> AbstractContextManager[bool]:
        """Within the block, transformers divides weights while it loads them, if ZeRO-3 is used."""
        return loading(settings, trained=trained)

    def freeze(self, module: nn.Module, config: LearnerConfig, device: torch.device, *, bf16: bool) -> nn.Module:
        """Return a module that is only ever run forward; in parts where trained ones are, so that any size fits."""
        if config.zero_stage == 3 or config.learner_tensor_parallel > 1:
            return partition_frozen(module, config, bf16=bf16)
        return super().freeze(module, config, device, bf16=bf16)

    def tile_mlps(self, model: nn.Module) -> bool:
        """Run the MLP of each layer over a part of the tokens at a time; return False if there is none."""
        return tile_mlps(model)

    def exchange_heads(self, kernel: Kernel, group: SequenceGroup, config: Any) -> str:
        """Register the kernel inside DeepSpeed's exchange of tokens and heads, and return its name."""
        return register_ulysses(kernel, group, config)


BACKEND = DeepSpeedBackend()
