"""Several turns with pictures: one is in the prompt, and after every second answer there is another one, with the model's placeholder."""

from typing import Any

import numpy as np
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
from PIL import Image

BEFORE, AFTER, PLACE = "\n<|user|>", "<|end|><|assistant|>", "<image>"


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turns = 0

    async def reset(self, states: dict, **kwargs):
        self.turns = 0
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        self.turns += 1
        if self.turns == 3:
            right = float(states["label"].lower() in states["action_text"].lower())
            return {
                "rewards": torch.tensor(right),
                "scores": torch.tensor(right),
                "environment_feedback": "\n<|end|>\n",
                "done": True,
                "extra_logs": {"turns": self.turns},
            }
        if self.turns % 2 == 0:
            screen = Image.fromarray(np.full((28, 28, 3), 40 * self.turns, dtype=np.uint8))
            feedback = f"{BEFORE}{PLACE}\nThe screen has changed. And now?{AFTER}"
            return {"rewards": torch.tensor(0.0), "environment_feedback": feedback, "environment_images": [screen], "done": False}
        return {"rewards": torch.tensor(0.0), "environment_feedback": f"{BEFORE}Look again.{AFTER}", "done": False}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
