"""Which directories a run may write to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.api.rewinding import rewind_records
from agentrl.config.mapping import from_mapping
from agentrl.config.schema import TrainConfig
from agentrl.core.directories import make_directory
from agentrl.core.errors import ConfigError
from agentrl.flow.checkpoint import Progress
from agentrl.resolve.plan import with_directory


def test_a_run_that_ended_before_its_first_step_may_be_started_again(tmp_path: Path) -> None:
    config = from_mapping(TrainConfig, {"agent": "x.py", "run_dir": str(tmp_path)})
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(json.dumps({"step": 0, "eval/reward": 0.5}) + "\n")
    (tmp_path / "evaluations.jsonl").write_text(json.dumps({"step": 0}) + "\n")
    assert with_directory(config).training.run_dir == tmp_path
    assert rewind_records(tmp_path, Progress()) == []
    assert metrics.read_text() == (tmp_path / "evaluations.jsonl").read_text() == ""
    metrics.write_text(json.dumps({"step": 0}) + "\n" + json.dumps({"step": 1}) + "\n")
    with pytest.raises(ConfigError, match="already holds a run"):
        with_directory(config)


def test_a_directory_that_cannot_be_made_is_named_with_its_flag(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("")
    for name, problem in (("notes", "is a file"), ("notes/run", "cannot be made: .*notes is a file")):
        with pytest.raises(ConfigError, match=rf"--run-dir = '.*{name}': {problem}"):
            with_directory(from_mapping(TrainConfig, {"agent": "x.py", "run_dir": str(tmp_path / name)}))
    with pytest.raises(ConfigError, match=r"--run-dir = '/proc/run': cannot be made"):
        make_directory(Path("/proc/run"))
    make_directory(tmp_path / "new" / "run")
    assert (tmp_path / "new" / "run").is_dir()
