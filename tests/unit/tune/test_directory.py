from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.methods import METHODS
from agentrl.core.errors import ConfigError
from agentrl.core.files import write_manifest
from agentrl.resolve.tune import load_given
from agentrl.tune.directory import CHECKPOINTS, RunDirectory, TuneResult, checkpoints_in, latest_checkpoint, open_directory

DPO = METHODS["dpo"]


def opened(run_dir: Path, **settings: Any) -> RunDirectory:
    given = {"data": "examples/tune/pairs.jsonl", "run_dir": run_dir, "lr_schedule": "constant", **settings}
    with load_given(DPO, given).in_directory() as plan:
        return open_directory(plan.run_dir, plan.settings.run.resume, plan.to_json())


def checkpoint(run_dir: Path, step: int, *, complete: bool = True) -> Path:
    path = run_dir / CHECKPOINTS / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "weights").write_text(str(step))
    if complete:
        write_manifest(path)
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


def test_other_rows_than_those_of_the_first_part_are_refused(tmp_path: Path):
    opened(tmp_path).check_data("one")
    checkpoint(tmp_path, 2)
    again = opened(tmp_path, resume="auto")
    again.check_data("one")
    with pytest.raises(ConfigError, match="goes on with other rows"):
        again.check_data("two")


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
