"""One answer, judged at once."""

import re
from typing import Any

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        super().__init__()

    async def reset(self, states: dict, **kwargs) -> dict[str, Any]:
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        numbers = re.findall(r"\d+", states["action_text"])
        right = bool(numbers) and numbers[-1] == states["label"]
        return {"rewards": torch.tensor(float(right)), "scores": float(right), "environment_feedback": "", "done": True}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
