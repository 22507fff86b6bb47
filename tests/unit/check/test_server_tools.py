"""A check says which tools of a server it could not call."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.env.plan import DataConfig
from agentrl.env.responses import PARAMS
from tests import env_servers
from tests.unit.check.support import played

pytestmark = pytest.mark.anyio

TOOL = {"type": "function", "name": "get_counter_value", "parameters": {"type": "object", "properties": {}}, "strict": True}


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["no tools", "one tool"])
async def test_rows_without_tools_leave_the_servers_tools_unchecked(tmp_path: Path, tools: list[dict[str, Any]]) -> None:
    rows = tmp_path / "rows.jsonl"
    params = {"input": [{"role": "user", "content": "Count."}], "tools": tools}
    rows.write_text(json.dumps({PARAMS: params, "initial_count": 3, "expected_count": 3}) + "\n")
    with env_servers.module("nemo_like") as server:
        context = await played(f"nemo-gym:http://127.0.0.1:{server.port}", DataConfig(prompts=str(rows)), episodes=1)
    unchecked = [text for text in context.report.skipped if "no row lists a function under responses_create_params.tools" in text]
    assert len(unchecked) == (not tools)
