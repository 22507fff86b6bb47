"""Up to three tries, with what was wrong in between; the prompt is handed back with the states."""

from typing import Any

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.utils.logging_utils import init_logger

logger = init_logger(__name__)


class Tries(AgentInstanceBase):
    async def reset(self, states: dict, **kwargs) -> dict[str, Any]:
        self.num_tries = 0
        return states

    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        self.num_tries += 1
        right = states["action_text"].strip() == states["label"]
        done = right or self.num_tries == 3
        return {
            "rewards": torch.tensor([1.0 / self.num_tries if right else 0.0]),
            "scores": torch.tensor(float(right)),
            "environment_feedback": "" if done else "<|user|>Wrong. Again.<|end|><|assistant|>",
            "done": done,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"right": torch.tensor(float(right))},
        }


class OtherAgent(AgentInstanceBase):
    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        raise NotImplementedError


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Tries)
