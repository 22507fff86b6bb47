"""The settings of ``agentrl eval``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.mapping import from_mapping, to_json
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError, UnknownFlagError
from agentrl.resolve.commands import load_eval
from agentrl.resolve.parts import cluster_plan

AGENT = ["--agent", "module:Name"]


def run_of(folder: Path, *models: str, **settings: Any) -> Path:
    """A run's directory with these of its models."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(to_json(from_mapping(TrainConfig, {"agent": "module:Name", **settings})))
    for name in models:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
    return folder


@pytest.mark.linux
def test_flags_of_episodes_engines_and_figures_are_those_of_training() -> None:
    config = load_eval(
        [*AGENT, "--max-new-tokens", "9", "--top-p", "0.5", "--eval-by", "level", "--kv-cache-gib", "1", "--env-isolation", "process"]
    )
    assert (config.rollout.max_new_tokens, config.rollout.top_p, config.eval.eval_by, config.engine.kv_cache_gib) == (9, 0.5, "level", 1.0)
    assert (config.isolation.env_isolation, config.run.runtime) == ("process", "local")
    assert config.measure.baseline is None


@pytest.mark.parametrize(
    "form",
    [
        ["--n-samples-per-prompt", "2", "--temperature", "0", "--num-tasks", "7"],
        ["--n-samples-per-prompt=2", "--temperature=0", "--num-tasks=7"],
    ],
)
def test_what_means_the_same_without_training_has_both_names(form: list[str]) -> None:
    config = load_eval([*AGENT, *form])
    assert (config.eval.eval_samples, config.eval.eval_temperature, config.data.eval_size) == (2, 0.0, 7)


def test_several_engines_need_ray() -> None:
    assert load_eval([*AGENT, "--num-engines", "2"]).run.runtime == "ray"
    with pytest.raises(ConfigError, match="--runtime ray"):
        load_eval([*AGENT, "--num-engines", "2", "--runtime", "local"])


def test_a_run_brings_environment_settings_and_its_best_model(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "run",
        "model",
        "best",
        seed=5,
        eval_size=8,
        eval_every=2,
        eval_samples=3,
        temperature=0.7,
        overlong_buffer=8,
        model="start/model",
    )
    config = load_eval(["--run", str(run), "--baseline", "start", "--max-turns", "3"])
    assert (config.model.model, config.measure.baseline, config.run.agent, config.run.seed) == (
        str(run / "best"),
        "start/model",
        "module:Name",
        5,
    )
    assert (config.data.eval_size, config.eval.eval_samples, config.eval.eval_temperature, config.rollout.max_turns) == (8, 3, 0.7, 3)
    assert config.penalty.overlong_buffer == 8  # rewards as in training
    assert load_eval([f"--run={run}", "--model", str(run / "model")]).model.model == str(run / "model")
    last = run_of(tmp_path / "last", "model")
    assert load_eval(["--run", str(last)]).model.model == str(last / "model")


def test_an_asynchronous_run_with_groups_and_ranks_can_be_measured(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "run",
        "model",
        max_staleness=2,
        num_learners=4,
        groups_per_step=8,
        advantage_estimator="rloo",
        n_samples_per_prompt=4,
        num_engines=2,
    )
    config = load_eval(["--run", str(run)])
    assert (cluster_plan(config).num_ranks, config.run.runtime) == (0, "ray")


def test_rules_of_its_own_name_flags_that_it_takes(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "model", overlong_buffer=8, n_samples_per_prompt=16)
    with pytest.raises(ConfigError, match=r"--max-new-tokens = 4: is less than the run's --overlong-buffer 8"):
        load_eval(["--run", str(run), "--max-new-tokens", "4"])
    with pytest.raises(ConfigError, match="--max-concurrent-episodes = 3: is less than --eval-samples 4"):
        load_eval(["--run", str(run), "--max-concurrent-episodes", "3"])
    assert load_eval(["--run", str(run), "--max-concurrent-episodes", "4"]).rollout.max_concurrent_episodes == 4


def test_start_without_a_run_is_the_bundled_model() -> None:
    config = load_eval([*AGENT, "--baseline", "start"])
    assert config.measure.baseline == ""


def test_a_file_brings_settings(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"agent": "module:Name", "max_turns": 2}))
    assert load_eval(["--config", str(tmp_path / "a.json")]).rollout.max_turns == 2


@pytest.mark.parametrize(
    ("words", "field", "says"),
    [
        ([], "--agent", "no environment"),
        (["--run", "{}/nowhere"], "--run", "holds no run"),
        (["--run", "{}/empty"], "--run", "no model"),
        (["--run", "{}/empty", "--config", "x.toml"], "--config", "own settings"),
        ([*AGENT, "--output", "{}/done"], "--output", "already holds"),
        ([*AGENT, "--eval-samples", "0"], "--eval-samples", "greater than"),
        ([*AGENT, "--temperature", "-1"], "--eval-temperature", "greater than"),
        ([*AGENT, "--temperature", "3"], "--eval-temperature", "less than"),
        ([*AGENT, "--seed", "-1"], "--seed", "greater than"),
        ([*AGENT, "--model", "{}/none/"], "--model", "no such directory"),
        ([*AGENT, "--prompts", "none.jsonl"], "--prompts", "no such file"),
    ],
)
def test_errors_name_the_flag(tmp_path: Path, words: list[str], field: str, says: str) -> None:
    run_of(tmp_path / "empty")
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "eval.json").write_text("{}")
    with pytest.raises(ConfigError, match=says) as caught:
        load_eval([word.format(tmp_path) for word in words])
    assert caught.value.field == field


@pytest.mark.parametrize(
    "flag", ["--learning-rate", "--groups-per-step", "--eval-every", "--keep-best", "--num-steps", "--gamma", "--publish"]
)
def test_flags_of_training_are_not_taken(flag: str) -> None:
    with pytest.raises(UnknownFlagError, match=flag):
        load_eval([*AGENT, flag, "1"])


def test_the_environment_may_stand_first() -> None:
    assert load_eval(["package.module:Name", "--eval-samples", "3"]).run.agent == "package.module:Name"
