"""Numbers of several kinds to log; no executor, no base class."""

from typing import Any

import numpy as np
import torch


class AgentInstance:
    async def reset(self, states: dict, **kwargs) -> dict[str, Any]:
        self.turn = 0
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        self.turn += 1
        length = len(states["action_text"])
        return {
            "rewards": torch.tensor(1.0 / (1 + length)),
            "scores": float(length < 4),
            "environment_feedback": "<|user|>Shorter.<|end|><|assistant|>",
            "done": self.turn == 2,
            "extra_logs": {"length": torch.tensor([length]), "even": np.bool_(length % 2 == 0), "turn": self.turn},
        }
