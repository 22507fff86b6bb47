"""An agent in a container that reaches the endpoint and nothing else is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import succeeded, train
from tests.sandboxes import IMAGE, container_engine, containers

ASK = """
import json, os, socket, sys, urllib.request
if os.listdir("/sys/class/net") != ["lo"]:
    sys.exit("there is a network")
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(2):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [answer, {"role": "user", "content": "Sure?"}]
print(answer["content"])
"""
REWARD = "def reward(completion, label):\n    return len(set(completion)) / 100\n"


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_an_agent_in_a_container_without_a_network_trains_two_steps(tmp_path: Path) -> None:
    engine = container_engine()
    (tmp_path / "ask.py").write_text(ASK)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"Say {word}."}) + "\n" for word in ("yes", "no")))
    agent = f"command:python3 {tmp_path}/ask.py {{prompt}}"
    data = ("--prompts", str(tmp_path / "tasks.jsonl"), "--reward", str(tmp_path / "reward.py"))
    boxes = ("--sandbox", "container", "--sandbox-image", IMAGE, "--sandbox-network", "endpoint")
    sizes = ("--num-steps", "2", "--groups-per-step", "2", "--n-samples-per-prompt", "2", "--max-new-tokens", "8", "--no-save-model")
    run = succeeded(train(tmp_path / "run", *data, *boxes, *sizes, "--runtime", "local", agent=agent, timeout_s=450, fork=False))
    ledger = run.summary["ledger"]
    assert (ledger["submitted"], ledger["trained"]) == (4, 4), run.output
    assert [row["endpoint/requests"] for row in run.metrics] == [2.0, 2.0]
    assert [row["endpoint/branches"] for row in run.metrics] == [1.0, 1.0]
    assert all(row["reward/mean"] > 0 for row in run.metrics)
    assert containers(engine) == []
