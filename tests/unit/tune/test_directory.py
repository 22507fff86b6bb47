from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.methods import METHODS
from agentrl.core.errors import ConfigError
from agentrl.core.files import commit_directory, temporary_directory
from agentrl.resolve.inputs import changed_files
from agentrl.resolve.tune import load_given
from agentrl.tune.directory import CHECKPOINTS, RunDirectory, TuneResult, checkpoints_in, latest_checkpoint, open_directory
from agentrl.tune.run import inputs_of
from tests.learner_support import write_model

DPO = METHODS["dpo"]


def opened(run_dir: Path, **settings: Any) -> RunDirectory:
    given = {"data": "examples/tune/pairs.jsonl", "run_dir": run_dir, "lr_schedule": "constant", **settings}
    with load_given(DPO, given).in_directory() as plan:
        return open_directory(plan.run_dir, plan.settings.run.resume, plan.to_json())


def checkpoint(run_dir: Path, step: int, *, complete: bool = True, file: str = "weights") -> Path:
    path = run_dir / CHECKPOINTS / f"checkpoint-{step}"
    temporary = temporary_directory(path)
    (temporary / file).write_text(str(step))
    commit_directory(temporary, path)
    if not complete:
        (path / "manifest.json").unlink()
    return path


def test_the_newest_complete_checkpoint_is_taken(tmp_path: Path):
    paths = [checkpoint(tmp_path, 2), checkpoint(tmp_path, 10), checkpoint(tmp_path, 11, complete=False)]
    (paths[0].parent / "other").mkdir()
    assert checkpoints_in(paths[0].parent) == paths
    assert latest_checkpoint(paths[0].parent) == paths[1]
    (paths[1] / "weights").write_text("other")
    assert latest_checkpoint(paths[0].parent) == paths[0]


def test_a_new_run_goes_on_from_nothing_and_an_old_one_is_not_overwritten(tmp_path: Path):
    first = opened(tmp_path / "run")
    assert (first.checkpoint, first.step, first.rows) == (None, 0, ())
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    with pytest.raises(ConfigError, match="already holds a run"):
        opened(tmp_path / "run")
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        opened(tmp_path / "run", resume=str(tmp_path / "run"))
    assert opened(tmp_path / "run", resume="auto").checkpoint is None
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


def test_a_resumed_run_takes_back_the_rows_after_its_checkpoint(tmp_path: Path):
    opened(tmp_path)
    checkpoint(tmp_path, 2)
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 0.5}}\n' for step in range(4)) + '{"step": 4')
    found = opened(tmp_path, resume=str(tmp_path))
    assert found.step == 2
    assert [row["step"] for row in found.rows] == [0, 1, 2]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert json.loads((tmp_path / "config.json").read_text())["run"]["resume"] == ""
    with pytest.raises(ConfigError, match=r"--beta \(was 0.1, now 0.4\)"):
        opened(tmp_path, resume=str(tmp_path), beta=0.4)


READ = {"rows": "1", "data": {"--data rows.jsonl": {"rows.jsonl": "1"}}, "files": {"--model: weights": {"model.safetensors": "1"}}}


def test_other_rows_than_those_of_the_first_part_are_refused_unless_they_are_accepted(tmp_path: Path):
    opened(tmp_path).check_inputs(READ, accepts_changes=False)
    checkpoint(tmp_path, 2)
    again = opened(tmp_path, resume="auto")
    again.check_inputs(READ, accepts_changes=False)
    written = {**READ, "data": {"--data rows.jsonl": {"rows.jsonl": "2"}}}
    again.check_inputs(written, accepts_changes=False)  # the same rows, written otherwise
    other = {**READ, "rows": "2"}
    with pytest.raises(ConfigError, match=r"other rows than it began with: --data rows.jsonl \(rows.jsonl\).*--accept-changed-inputs"):
        again.check_inputs(other, accepts_changes=False)
    again.check_inputs(other, accepts_changes=True)
    again.check_inputs(other, accepts_changes=False)  # what was accepted is what the run has now


def test_other_models_are_refused_even_where_changes_are_accepted(tmp_path: Path):
    opened(tmp_path).check_inputs(READ, accepts_changes=False)
    checkpoint(tmp_path, 2)
    other = {**READ, "files": {"--model: weights": {"model.safetensors": "2"}}}
    with pytest.raises(ConfigError, match=r"--model: weights \(model.safetensors\). Restore them, or start a new run"):
        opened(tmp_path, resume="auto").check_inputs(other, accepts_changes=True)


def test_inputs_are_found_by_their_content(tmp_path: Path):
    rows, template = tmp_path / "rows.jsonl", tmp_path / "chat.jinja"
    rows.write_text("{}\n")
    template.write_text("{{ messages }}")
    (tmp_path / "part").mkdir()
    for name in ("a", "b"):
        (tmp_path / "part" / f"{name}.jsonl").write_text(name)
    given = {"data": f"{rows},{tmp_path / 'part'}", "reference": write_model(tmp_path / "other"), "chat_template": str(template)}
    found = inputs_of(load_given(DPO, given), "1")
    assert list(found["data"]) == [f"--data {rows}", f"--data {tmp_path / 'part'}"]
    assert [list(each) for each in found["data"].values()] == [["rows.jsonl"], ["a.jsonl", "b.jsonl"]]
    assert {"--model: weights", "--model: chat template", "--reference: weights", "--chat-template"} <= found["files"].keys()
    rows.write_text("{ }\n")
    assert changed_files(found["data"], inputs_of(load_given(DPO, given), "1")["data"]) == [f"--data {rows} (rows.jsonl)"]


def test_a_run_of_the_trainer_before_is_refused_and_left_as_it_was(tmp_path: Path):
    opened(tmp_path)
    checkpoint(tmp_path, 2, file="trainer_state.json")
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 0.5}}\n' for step in range(4)))
    with pytest.raises(ConfigError, match=r"is a run of an earlier version.*--config .*config.json --model .*checkpoints/checkpoint-2 and"):
        opened(tmp_path, resume="auto")
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match=rf"--model {tmp_path}/model and another --run-dir"):
        opened(tmp_path, resume=str(tmp_path))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_the_settings_of_a_run_of_the_trainer_before_begin_a_new_one(tmp_path: Path):
    earlier = json.loads(load_given(DPO, {"data": "examples/tune/pairs.jsonl", "run_dir": tmp_path / "old", "beta": 0.3}).to_json())
    del earlier["optim"]["adam_betas"], earlier["lora"]["lora_variant"]
    earlier["optim"] |= {"adam_beta1": 0.8, "adam_beta2": 0.95}
    earlier["lora"] |= {"use_rslora": False, "use_dora": False}
    earlier["track"] |= {"wandb_project": "", "trackio_project": ""}
    (tmp_path / "config.json").write_text(json.dumps(earlier))
    plan = load_given(DPO, {"config": str(tmp_path / "config.json"), "run_dir": tmp_path / "new"})
    assert (plan.settings.optim.adam_betas, plan.settings.method.beta) == ((0.8, 0.95), 0.3)


def test_what_a_killed_run_left_is_removed_and_complete_checkpoints_stay(tmp_path: Path):
    opened(tmp_path)
    kept = checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 4, complete=False)
    for name in (".checkpoint-4.partial", ".checkpoint-1.old.partial"):
        (kept.parent / name / "policy").mkdir(parents=True)
    opened(tmp_path, resume="auto").tidy()
    assert list(kept.parent.iterdir()) == [kept]


def test_the_result_of_a_run_is_read_from_its_directory(tmp_path: Path):
    (tmp_path / "summary.json").write_text('{"status": "finished", "steps": 2}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "loss": 0.1}\n')
    result = TuneResult.read(tmp_path)
    assert (result.status, result.steps, result.metrics, result.model) == ("finished", 2, {"step": 2, "loss": 0.1}, tmp_path / "model")


def test_a_notebook_shows_the_losses_of_a_result(tmp_path: Path):
    (tmp_path / "summary.json").write_text('{"status": "finished", "steps": 3}')
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": {1 / step}}}\n' for step in (1, 2, 3)))
    html = TuneResult.read(tmp_path)._repr_html_()
    assert "loss, 0.333 to 1.000, steps 1 to 3" in html
    assert "<polyline" in html
    assert "agentrl view" in html


def test_a_resumed_run_is_held_where_it_is_found(tmp_path: Path):
    opened(tmp_path / "old")
    with load_given(DPO, {"run_dir": tmp_path / "new", "resume": tmp_path / "old"}).in_directory() as placed:
        assert placed.run_dir == placed.settings.run.run_dir == tmp_path / "old"
    assert not (tmp_path / "new").exists()
