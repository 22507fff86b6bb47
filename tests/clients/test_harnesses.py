"""Agent programs as they are: sessions with a scripted model, and two steps of training, each with the real program in a sandbox."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.assets import tiny_model_path
from agentrl.check.harness import NUM_EDITS
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import Status
from agentrl.harness import HARNESSES
from agentrl.rollout.chat import ChatCodec
from agentrl.suites.load import load_agent
from tests.clients.test_suites import long_model_in
from tests.e2e.runs import succeeded, train
from tests.harness_matrix import keep, places, program_of
from tests.sandboxes import IMAGE, container_engine, needs_sandbox
from tests.unit.rollout.endpoint.support import play_one

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200), needs_sandbox]

PLENTY, LENGTH = 1_000_000, 32_768
TRAINED = ("claude-code", "codex", "opencode")


def spec(name: str, dialect: str = "", *, brief: bool = False) -> str:
    program = program_of(HARNESSES[name])
    if not program.exists():
        pytest.skip(f"there is no {program}: run make test-clients, with npm")
    return f"harness:{name}?program={program}&brief={brief}" + (f"&dialect={dialect}" if dialect else "")


@pytest.mark.parametrize(("name", "dialect"), places())
def test_a_session_of_ten_edits_is_one_row_per_conversation(name: str, dialect: str) -> None:
    result = agentrl.check(spec(name, dialect), budget_s=1000.0)
    measured = result.report.harness
    session = measured["session"]
    assert (session["error"], session["edits"], session["complete"]) == ("", NUM_EDITS, True), session
    assert not result.errors
    agents = 1 + session["branches"].get("sub-agent", 0) - len(session["helpers"])
    assert (len(session["rows"]), session["wasted"]) == (agents, 0), session
    assert measured["version"] == HARNESSES[name].version
    keep(name, dialect, measured, asyncio.run(first_prompt(name, dialect)))


async def first_prompt(name: str, dialect: str) -> int:
    """Tokens of the first prompt of a brief start."""
    cls: Any = load_agent(f"{spec(name, dialect, brief=True)}#judge=echo 1").load()
    codec = ChatCodec(load_tokenizer(str(tiny_model_path())))  # as in `agentrl check`
    _, trajectory = await play_one(cls, "All done.", codec=codec, max_model_len=PLENTY, episode_timeout_s=300.0)
    assert (trajectory.error, trajectory.status) == (None, Status.FINISHED), name
    return len(next(turn for turn in trajectory.turns if not turn.helper).prompt_ids)


def test_a_program_in_a_container_reaches_nothing_but_its_model() -> None:
    container_engine()
    cls: Any = load_agent(f"{spec('claude-code', brief=True)}#judge=echo 1").load()
    box = {"sandbox": "container", "sandbox_image": IMAGE, "sandbox_network": "endpoint"}
    _, trajectory = asyncio.run(play_one(cls, "All done.", max_model_len=PLENTY, episode_timeout_s=300.0, **box))
    assert (trajectory.error, trajectory.reward) == (None, 1.0)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_model_in(tmp_path_factory.mktemp("model") / "long", LENGTH)


@pytest.mark.parametrize("name", TRAINED)
def test_a_program_trains_two_steps(name: str, long_model: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"Say {word}.", "label": word}) + "\n" for word in ("yes", "no")))
    (tmp_path / "reward.py").write_text("def reward(completion, label):\n    return len(set(completion)) / 100\n")
    data = ("--prompts", str(tmp_path / "tasks.jsonl"), "--reward", str(tmp_path / "reward.py"), "--model", str(long_model))
    sizes = ("--num-steps", "2", "--groups-per-step", "2", "--n-samples-per-prompt", "2", "--max-new-tokens", "16")
    flags = ("--max-model-len", str(LENGTH), "--runtime", "local", "--train-branches", "agent", "--no-save-model")
    run = succeeded(train(tmp_path / "run", *data, *sizes, *flags, agent=spec(name, brief=True), timeout_s=1000, fork=False))
    ledger = run.summary["ledger"]
    assert (ledger["submitted"], ledger["trained"]) == (4, 4), run.output
    assert all(row["reward/mean"] > 0 for row in run.metrics)
    assert all(row["endpoint/refused"] == 0 for row in run.metrics)
