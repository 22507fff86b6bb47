"""An agent in OpenRLHF's dictionary form runs unchanged, whatever it inherits from."""

from pathlib import Path

import pytest

from agentrl.core.types import Status
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import CODEC, Scene, says

pytestmark = pytest.mark.anyio

AGENT = """
import torch

class AgentInstance:
    def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> dict:
        observation_text, action_text, label = states["observation_text"], states["action_text"], states["label"]
        assert observation_text.endswith("assistant\\n") or self.step_idx
        done = self.step_idx >= 1
        reward = torch.tensor([float(action_text == label)]) if done else torch.tensor(0)
        self.step_idx += 1
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": "\\nHuman: try again\\nAssistant: " if not done else "\\nHuman: done",
            "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"dummy_scores": reward, "turn_count": self.step_idx},
        }
"""


async def test_a_two_turn_agent(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(AGENT)
    scene = Scene(load_agent(str(path)).load(), ScriptedEngine(answer=says("two", "three")))
    trajectory = await scene.play()
    assert trajectory.error is None
    assert (trajectory.status, trajectory.reward, trajectory.score) == (Status.FINISHED, 1.0, 1.0)
    assert CODEC.decode(trajectory.turns[1].prompt_ids) == "\nHuman: try again\nAssistant: "
    assert trajectory.metrics == {"dummy_scores": 0.5, "turn_count": 1.5}
