"""A run is resumed whose tasks, code or model are not what they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from agentrl.assets import tiny_model_path
from tests.e2e.runs import Run, succeeded, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ENV = """
from agentrl import AgentInstance, StepResult

FACTOR = 1.0


class Letters(AgentInstance):
    def step(self, state):
        return StepResult(FACTOR * (len(state.action_text) % 3), terminated=True)
"""
SIZES = ("--groups-per-step", "8", "--n-samples-per-prompt", "2", "--max-new-tokens", "6", "--seed", "3")
MORE = ("--runtime", "local", "--engine", "transformers", "--no-tensorboard", "--no-save-model", "--record", "all", "--save-every", "1")
EVALUATED = ("--eval-size", "4", "--eval-every", "1", "--eval-samples", "1")


def write_rows(path: Path, *words: str) -> None:
    rows = [{"prompt": f"{word} {number}", "label": str(number)} for word in words for number in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def begun(tmp_path: Path) -> Run:
    (tmp_path / "env.py").write_text(ENV)
    write_rows(tmp_path / "rows.jsonl", "question")
    shutil.copytree(tiny_model_path(), tmp_path / "model")
    words = ("--prompts", str(tmp_path / "rows.jsonl"), "--model", str(tmp_path / "model"), "--num-steps", "1")
    return succeeded(train(tmp_path / "run", *words, *SIZES, *MORE, *EVALUATED, agent=tmp_path / "env.py"))


def resume(run: Run, *words: str) -> Run:
    return train(run.directory, "--resume", str(run.directory), *words, agent=run.directory.parent / "env.py", fork=False)


def prompts(run: Run, name: str) -> list[tuple[int, str]]:
    """Version or group, and the prompt of each recorded episode."""
    rows = [json.loads(line) for line in (run.directory / name).read_text().splitlines()]
    return [(row["version"] if name.startswith("eval") else row["group_id"], row["turns"][0]["prompt_text"]) for row in rows]


def test_rows_that_were_added_come_later_and_what_was_held_out_stays_so(begun: Run) -> None:
    write_rows(begun.directory.parent / "rows.jsonl", "question", "other")
    again = succeeded(resume(begun, "--num-steps", "5"))
    assert "20 tasks added since the run began, drawn from epoch 1 on" in again.output
    trained, evaluated = prompts(again, "trajectories.jsonl"), prompts(again, "eval_trajectories.jsonl")
    steps = [{prompt for group, prompt in trained if group // 8 == step} for step in range(5)]
    assert len(steps[0] | steps[1]) == 16  # an epoch of the 16 tasks that were there
    assert not any("other" in prompt for prompt in steps[0] | steps[1])
    assert any("other" in prompt for step in steps[2:] for prompt in step)
    asked = {version: {prompt for number, prompt in evaluated if number == version} for version in range(1, 6)}
    assert all(asked[version] == asked[1] for version in asked)
    assert not asked[1] & set.union(*steps)
    assert (again.directory / "checkpoints" / "step-00000005" / "inputs.json").is_file()


def test_other_rows_and_another_model_are_refused_unless_they_are_accepted(begun: Run) -> None:
    folder = begun.directory.parent
    write_rows(folder / "rows.jsonl", "riddle")
    refused = resume(begun, "--num-steps", "2")
    assert refused.code == 2
    assert "20 of 20 tasks with which the run began are changed: 0, 1, 2, 3, 4 and 15 more" in refused.output
    write_rows(folder / "rows.jsonl", "question")
    weights = folder / "model" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused = resume(begun, "--num-steps", "2")
    assert refused.code == 2
    assert "reads other files than the run began with: --model: weights (model.safetensors)" in refused.output
    succeeded(resume(begun, "--num-steps", "2", "--accept-changed-inputs"))
    succeeded(resume(begun, "--num-steps", "3"))  # what was accepted is what the run has now


def test_changed_code_is_said_and_both_versions_are_kept(begun: Run) -> None:
    env = begun.directory.parent / "env.py"
    env.write_text(ENV.replace("FACTOR = 1.0", "FACTOR = 2.0"))
    again = succeeded(resume(begun, "--num-steps", "2"))
    assert "the environment's code is not what it was until step 1: env.py (+1 -1 lines)" in again.output
    kept = begun.directory / "environment"
    assert "FACTOR = 2.0" in (kept / "env.py").read_text()
    assert "FACTOR = 1.0" in (kept / "until-step-00000001" / "env.py").read_text()
