"""Commands that begin with the settings of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.resolve.commands import load_eval, load_sample, read_train
from agentrl.resolve.plan import RunPlan

AGENT = ["--agent", "envs/arithmetic.py"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has a model, as far as its settings tell."""
    plan = RunPlan.of(read_train([*AGENT, "--max-turns", "3", "--run-dir", str(tmp_path / "run")]))
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (tmp_path / "run" / "config.json").write_text(plan.to_json())
    return tmp_path / "run"


@pytest.mark.parametrize("words", [("--run", "{run}"), ("--config", "{run}/config.json")])
def test_a_data_set_is_sampled_with_the_settings_of_a_run(run: Path, words: tuple[str, ...]) -> None:
    config = load_sample([word.format(run=run) for word in words])
    assert config.rollout.max_turns == 3
    assert config.select.resume is False
    assert config.model.model == str(run / "model")


def test_a_data_set_goes_on_if_that_is_said(run: Path, tmp_path: Path) -> None:
    assert load_sample(["--run", str(run), "--output", str(tmp_path / "data"), "--resume"]).select.resume


def test_a_file_of_settings_may_choose_the_rows(tmp_path: Path) -> None:
    (tmp_path / "sample.toml").write_text('agent = "envs/arithmetic.py"\nselect = "all"\n')
    assert load_sample(["--config", str(tmp_path / "sample.toml")]).select.select == "all"


def test_an_evaluation_has_the_settings_of_a_run(run: Path) -> None:
    config = load_eval(["--run", str(run)])
    assert (config.rollout.max_turns, config.measure.baseline) == (3, None)
