"""Programs that reach the endpoint of their model and nothing else."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.config.commands import load_config
from agentrl.core.errors import ConfigError
from agentrl.env.load import load_agent
from agentrl.env.sandbox import relay
from tests.sandboxes import needs_sandbox
from tests.unit.rollout.endpoint.support import TASK, play_one

ASK = """
import json, os, socket, sys, urllib.request
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
for turn in range(2):
    body = {"model": "m", "messages": [{"role": "user", "content": f"{sys.argv[1]} {turn}"}]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[2])), timeout=5)
    answer = "another server answers"
except OSError:
    pass
print(answer)
sys.exit(int(sys.argv[3]))
"""


@pytest.fixture
def other() -> Iterator[int]:
    """Port of a server on this machine that programs must not reach."""
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.anyio
@needs_sandbox
@pytest.mark.parametrize(("network", "reward"), [("endpoint", 1.0), ("host", 0.0)])
async def test_a_program_reaches_the_endpoint_and_nothing_else(network: str, reward: float, tmp_path: Path, other: int) -> None:
    (tmp_path / "ask.py").write_text(ASK)
    (tmp_path / "reward.py").write_text("def reward(completion, label):\n    return float(completion.strip() == label)\n")
    spec = f"command:{sys.executable} -S {tmp_path}/ask.py {{prompt}} {other} CODE#reward={tmp_path}/reward.py"
    _, trajectory = await play_one(load_agent(spec.replace("CODE", "0")).load(), str(TASK.label), sandbox_network=network)
    assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, reward, 2)
    _, failed = await play_one(load_agent(spec.replace("CODE", "3")).load(), str(TASK.label), sandbox_network=network)
    assert "exited with code 3" in (failed.error or "")


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--sandbox", "none"), "--sandbox-network"),
        (("--endpoint-url", "http://{host}:{port}"), "--endpoint-url"),
    ],
)
def test_a_line_is_refused_where_it_leads_nowhere(words: tuple[str, ...], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["--agent", "a.b:C", "--sandbox-network", "endpoint", *words])
    assert caught.value.field == field


@pytest.mark.anyio
async def test_a_client_whose_far_end_is_gone_is_closed() -> None:
    class Writer:
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    async def connect() -> relay.Streams:
        raise ConnectionRefusedError

    writer = Writer()
    await relay.join(None, writer, connect)  # type: ignore[arg-type]
    assert writer.is_closed
