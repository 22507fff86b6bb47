"""The manifest of inputs: each thing that a run reads again is compared, by what it holds."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.assets import tiny_model_path
from agentrl.core.errors import ConfigError, DataError
from agentrl.core.fingerprints import SAMPLES, WHOLE_BYTES, fingerprint_of
from agentrl.resolve.commands import read_train
from agentrl.resolve.inputs import Inputs, changed_code, changed_files, keep_code, of_questions, read_inputs, refuse_changed
from agentrl.resolve.plan import RunPlan

ENV = """
from helper import score

from agentrl import AgentInstance, StepResult


class Sums(AgentInstance):
    def step(self, state):
        return StepResult(score(state.action_text), terminated=True)
"""
ROWS = [{"prompt": f"{number}?", "label": str(number)} for number in range(12)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with everything that a run may read: models, an environment with a module of its own, data sets, a template."""
    for name in ("model", "teacher", "judge", "rival"):
        shutil.copytree(tiny_model_path(), tmp_path / name)
    (tmp_path / "judge" / "config.json").write_text(json.dumps({"architectures": ["LlamaForSequenceClassification"]}))
    _with_head(tmp_path / "judge")
    monkeypatch.delitem(sys.modules, "helper", raising=False)  # of another test's folder
    (tmp_path / "env.py").write_text(ENV)
    (tmp_path / "helper.py").write_text("def score(text):\n    return float(len(text) % 2)\n")
    (tmp_path / "template.jinja").write_text("{{ messages[0]['content'] }}")
    for name in ("rows", "questions"):
        write_rows(tmp_path / f"{name}.jsonl", ROWS)
    return tmp_path


def _with_head(judge: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"score.weight": np.zeros((1, 8), np.float32)}, judge / "model.safetensors")


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(folder: Path, before: Inputs | None = None, *words: str) -> Inputs:
    """What a run reads; with `before`, one that is resumed."""
    given = ("--agent", str(folder / "env.py"), "--prompts", str(folder / "rows.jsonl"), "--eval-every", "1", "--runtime", "local")
    models = ("--model", str(folder / "model"), "--reward-model", str(folder / "judge"), "--chat-template", str(folder / "template.jinja"))
    teacher = ("--teacher", str(folder / "teacher"), "--engine", "transformers", "--skip-checks", "env")
    plan = RunPlan.of(read_train([*given, *models, *teacher, *(words or ("--eval-prompts", str(folder / "questions.jsonl")))]), named=False)
    tasks, questions = plan.tasks(before)
    inputs = read_inputs(plan.inputs, tasks, of_questions(questions, tasks))
    return Inputs.from_json(json.loads(json.dumps(inputs.to_json())))


def touch_weights(path: Path) -> None:
    """Change one number of the weights, and neither their size nor the time of their file."""
    file, stat = path / "model.safetensors", (path / "model.safetensors").stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, (stat.st_atime, stat.st_mtime))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights": (lambda f: touch_weights(f / "model"), r"--model: weights \(model.safetensors\)"),
    "configuration": (lambda f: (f / "model" / "config.json").open("a").write(" "), r"--model: configuration \(config.json\)"),
    "tokenizer": (lambda f: (f / "model" / "tokenizer.json").open("a").write(" "), r"--model: tokenizer \(tokenizer.json\)"),
    "template of the model": (lambda f: (f / "model" / "chat_template.jinja").open("a").write(" "), r"--model: chat template \(chat_temp"),
    "template file": (lambda f: (f / "template.jinja").write_text("{{ messages }}"), r"--chat-template \(template.jinja\)"),
    "teacher": (lambda f: touch_weights(f / "teacher"), r"--teacher: weights"),
    "reward model": (lambda f: touch_weights(f / "judge"), r"--reward-model judge: weights"),
    "file that is gone": (lambda f: (f / "model" / "chat_template.jinja").unlink(), ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_and_templates_are_refused_if_they_changed(folder: Path, name: str) -> None:
    before = read(folder)
    refuse_changed(before.files, read(folder, before).files, "runs/a")
    change, shown = REFUSED[name]
    change(folder)
    if not shown:  # of what is not on this machine nothing is known: a cluster's machines may have it
        refuse_changed(before.files, read(folder, before).files, "runs/a")
        return
    with pytest.raises(
        ConfigError, match=rf"--resume = 'runs/a': reads other files than the run began with: {shown}.*--accept-changed-inp"
    ):
        refuse_changed(before.files, read(folder, before).files, "runs/a")


def test_files_that_are_written_anew_or_elsewhere_are_the_same(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read(folder)
    monkeypatch.delitem(sys.modules, "helper")  # another process would load its own
    other = tmp_path_factory.mktemp("other") / "machine"
    shutil.copytree(folder, other)
    for path in other.rglob("*"):
        os.utime(path, (1, 1))
    after = read(other, before)
    refuse_changed(before.files, after.files, "runs/a")
    assert changed_code(before, after) == {}


def test_what_was_not_on_the_machine_before_is_not_compared(folder: Path) -> None:
    before = read(folder)
    refuse_changed({}, before.files, "runs/a")


def test_added_questions_are_not_asked_and_changed_ones_are_refused(folder: Path) -> None:
    before = read(folder)
    write_rows(folder / "questions.jsonl", [*ROWS, {"prompt": "new?", "label": "1"}])
    assert read(folder, before).questions == before.questions
    write_rows(folder / "questions.jsonl", ROWS[:-1])
    with pytest.raises(DataError, match="1 of 12 tasks with which the run began are gone: 11"):
        read(folder, before)


def test_evaluations_may_begin_later(folder: Path) -> None:
    before = read(folder)
    without = Inputs(tasks=before.tasks, files=before.files, code=before.code)
    assert read(folder, without).questions == before.questions


def test_held_out_tasks_stay_held_out(folder: Path) -> None:
    before = read(folder, None, "--eval-size", "4")
    assert before.questions is None
    assert len(before.tasks.held_out) == 4
    write_rows(folder / "rows.jsonl", [*ROWS, *({"prompt": f"new {number}?", "label": "1"} for number in range(12))])
    after = read(folder, before, "--eval-size", "4")
    assert after.tasks.held_out == before.tasks.held_out
    assert after.tasks.growth == ((0, 8), (1, 20))
    write_rows(folder / "rows.jsonl", [*ROWS[:-1], {"prompt": "11?", "label": "12"}])
    with pytest.raises(DataError, match="1 of 12 tasks with which the run began are changed: 11"):
        read(folder, before, "--eval-size", "4")


def test_code_is_compared_with_what_it_imports_and_both_versions_are_kept(folder: Path, tmp_path: Path) -> None:
    before = read(folder)
    assert set(before.code) == {"env.py", "helper.py"}
    after = Inputs(tasks=before.tasks, files=before.files, code={**before.code, "helper.py": "def score(text):\n    return 1.0\n"})
    assert changed_code(before, after) == {"helper.py": "+1 -1"}
    run = tmp_path / "run"
    keep_code(before, None, run, 0)
    keep_code(before, before, run, 4)
    assert sorted(path.name for path in (run / "environment").iterdir()) == ["env.py", "helper.py"]
    keep_code(after, before, run, 7)
    assert (run / "environment" / "helper.py").read_text() == after.code["helper.py"]
    assert (run / "environment" / "until-step-00000007" / "helper.py").read_text() == before.code["helper.py"]
    fewer = Inputs(tasks=before.tasks, code={"env.py": before.code["env.py"]})
    assert changed_code(before, fewer) == {"helper.py": "+0 -2"}


def test_an_earlier_checkpoint_without_a_manifest_is_compared_with_nothing(tmp_path: Path) -> None:
    from agentrl.flow.checkpoint import read_inputs as read_saved

    assert read_saved(tmp_path) == {}


def test_a_change_anywhere_in_a_small_file_and_everywhere_in_a_large_one_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1000))
    small = fingerprint_of(file)
    file.write_bytes(bytes(999) + b"\x01")
    assert fingerprint_of(file) != small
    file.write_bytes(bytes(1001))
    assert fingerprint_of(file) != small
    size = WHOLE_BYTES + 10**6
    file.write_bytes(bytes(size))
    large = fingerprint_of(file)
    for place in (0, size - 1, size // SAMPLES * 3 // SAMPLES * SAMPLES):
        content = bytearray(size)
        content[place : place + 10**6] = b"\x01" * min(10**6, size - place)
        file.write_bytes(content)
        assert fingerprint_of(file) != large


def test_other_demonstrations_are_other_files(folder: Path) -> None:
    words = ["--agent", str(folder / "env.py"), "--prompts", str(folder / "rows.jsonl"), "--runtime", "local", "--engine", "transformers"]
    plan = RunPlan.of(read_train(words), named=False)
    tasks, _ = plan.tasks()
    before, same, other, without = (read_inputs(plan.inputs, tasks, None, rows).files for rows in ("a", "a", "b", ""))
    assert changed_files(before, same) == []
    assert changed_files(before, other) == ["--sft-data (rows)"]
    assert changed_files(without, other) == []  # a run that an earlier version began
