"""Servers of the Model Context Protocol: the reference server of npm and one in Python, in episodes, check, eval and training."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config.sections import changed
from agentrl.suites.load import load_agent
from tests.clients.mcp_sums import EVERYTHING
from tests.e2e.everywhere import runs_everywhere
from tests.sandboxes import needs_sandbox
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import PATIENT, Scene, says

pytestmark = [
    pytest.mark.clients,
    pytest.mark.anyio,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not EVERYTHING.exists(), reason="the reference server needs npm"),
    needs_sandbox,
]
SPEC = str(Path(__file__).parent / "mcp_sums.py")


async def test_tools_of_both_servers_in_an_episode() -> None:
    texts = ('{"tool":"get-sum","args":{"a":1,"b":2}}{"tool":"add","args":[1,2]}{"tool":"get-sum","args":{"a":"x"}}', "3")
    engine = ScriptedEngine(answer=says(*texts), max_model_len=4096)
    trajectory = await Scene(load_agent(SPEC).load(), engine, changed(PATIENT, max_new_tokens=200)).play()
    assert trajectory.error is None
    assert (trajectory.metrics["tool_calls"], trajectory.metrics["bad_calls"]) == (3.0, 1.0)
    read = trajectory.turns[1].prompt_text
    assert "The sum of 1 and 2 is 3." in read
    assert "'b' is a required property" in read


def test_an_environment_with_both_servers_is_checked_evaluated_and_trained(tmp_path: Path) -> None:
    runs_everywhere(tmp_path, SPEC)
