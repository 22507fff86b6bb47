"""A free first turn, then a cold and short one: the settings of the next turn are changed and handed back."""

from typing import Any

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    async def reset(self, states: dict, **kwargs) -> dict[str, Any]:
        self.temperatures = []
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        sampling_params = states["sampling_params"]
        self.temperatures.append(sampling_params.temperature)
        done = len(self.temperatures) == 2
        sampling_params.temperature = 0.5
        sampling_params.max_tokens = 4
        return {
            "rewards": float(states["label"] in states["action_text"]),
            "environment_feedback": "" if done else "<|user|>In short?<|end|><|assistant|>",
            "done": done,
            "sampling_params": sampling_params,
            "extra_logs": {"temperature": self.temperatures[-1]},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
