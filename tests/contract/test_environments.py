"""agentrl.testing.check_environment passes for a ready-made environment, and names what is violated with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

import agentrl
from agentrl.testing import check_environment

pytestmark = pytest.mark.anyio
ENVS = Path(__file__).parents[2] / "envs"


def test_a_ready_made_environment_passes() -> None:
    check_environment(str(ENVS / "arithmetic.py"), episodes=2)


class Wrong(agentrl.AgentInstance):
    """Gives a reward that is no number."""

    @classmethod
    def tasks(cls) -> list[agentrl.Task]:
        return [agentrl.Task(f"Say {number}.", label=number) for number in range(8)]

    def step(self, state: agentrl.StepState) -> agentrl.StepResult:
        return agentrl.StepResult("good", terminated=True)  # type: ignore[arg-type]


async def test_a_violation_is_named_inside_a_running_event_loop(anyio_backend: str) -> None:
    with pytest.raises(AssertionError, match=r"(?s)error reward-type: .*Wrong.*\n    "):
        check_environment(Wrong, episodes=2)
