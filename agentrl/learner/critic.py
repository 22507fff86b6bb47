"""The critic: a transformers model with one number per token instead of logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from agentrl.learner.layout import MicroBatch


class ValueModel(nn.Module):
    """Value of the state in which each action token is about to be sampled.

    The new output layer starts at 0, so that the first values are 0 whatever the seed.

    Args:
        model: A transformers model without output layer.
    """

    model: Any

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Linear(self.model.config.get_text_config().hidden_size, 1, bias=False, dtype=self.model.dtype)
        nn.init.zeros_(self.head.weight)

    def forward(self, micro: MicroBatch) -> Tensor:
        """Values of the action tokens of a micro-batch. # [a] float32."""
        hidden: Tensor = self.model(**micro.inputs(), use_cache=False).last_hidden_state
        values: Tensor = self.head(hidden.flatten(0, 1)[micro.select])[:, 0]
        return values.to(torch.float32)
