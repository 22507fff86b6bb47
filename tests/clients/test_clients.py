"""Real clients of the endpoint, each a program in a process of its own, against a scripted model; `make test-clients` installs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentrl.core.types import Status
from agentrl.suites.load import load_agent
from tests.clients.table import CLIENTS, ROOT, Client
from tests.unit.rollout.endpoint.support import CODEC, play_one, sampled

HERE = Path(__file__).parent
VENV = Path(os.environ.get("AGENTRL_CLIENTS", ROOT / ".venv-clients")).absolute()
LONG = 131_072
"""Tokens of the context: the small tokenizer makes about one token per character of prompts that have up to 10,000."""


@pytest.mark.clients
@pytest.mark.anyio
@pytest.mark.timeout(200)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.id)
async def test_a_client_is_trained_as_it_is(client: Client) -> None:
    assert (VENV / "bin" / "python").exists(), f"there is no {VENV}; run make test-clients"
    if client.package == "pi" and not (VENV / "node_modules").exists():
        pytest.skip("pi needs npm")
    program = f"{VENV}/bin/python {HERE}/programs/{client.program}.py {client.mode} {{prompt}}"
    cls = load_agent(f"command:{program}#reward={HERE}/reward.py").load()
    stage, trajectory = await play_one(
        cls, *client.answers, max_model_len=LONG, episode_timeout_s=180.0, forced_forms="free", sandbox="none"
    )
    assert (trajectory.error, trajectory.status, trajectory.reward) == (None, Status.FINISHED, 1.0)
    expected = [[*CODEC.encode_text(text), *CODEC.turn_end_ids] for text in client.answers]
    assert sorted(sampled(trajectory)) == sorted(expected)  # each sampled token is trained once
    assert not any(turn.masked for turn in trajectory.turns)
    assert tuple(turn.branch_reason for turn in trajectory.turns if turn.branch_reason) == client.branches
    counts = {name: trajectory.metrics[f"endpoint/{name}"] for name in ("requests", "retries", "refused", "abandoned", "delivered")}
    assert counts == {"requests": len(client.answers), "retries": 0, "refused": 0, "abandoned": 0, "delivered": 1}
    contexts = stage.episodes[0].session.graph.histories
    assert len(contexts) == 1 + len(client.branches)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.id)
def test_the_docs_name_what_each_client_does(client: Client) -> None:
    assert client.row in (ROOT / "docs" / "black_box.md").read_text().splitlines()
