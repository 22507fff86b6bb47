"""The plan of a training run: decided once, printed by ``--dry-run``, written into ``config.json``, with the source of each setting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import agentrl
from agentrl.api.preview import preview
from agentrl.assets import CHOSEN_VISION, VISION_MODEL, located_model, tiny_model_path
from agentrl.cli.main import main
from agentrl.config.mapping import flattened, from_mapping
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError
from agentrl.resolve.commands import load_config, read_train
from agentrl.resolve.plan import Host, RunPlan
from agentrl.resolve.saved import with_saved_settings
from agentrl.resolve.steps import Steps, names_that_differ
from tests.e2e import forked

AGENT = ["--agent", "envs/arithmetic.py"]
TINY_STEPS = ["--runtime", "local", "--num-steps", "1", "--groups-per-step", "1", "--n-samples-per-prompt", "2", "--max-new-tokens", "4"]


class Machine(Host):
    """A machine with so many cores and no GPU."""

    def __init__(self, cores: int) -> None:
        self.__dict__ |= {"cores": cores, "gpu_bytes": 0.0}


def plan_of(*words: str, host: Host | None = None) -> RunPlan:
    return RunPlan.of(read_train([*AGENT, *words]), host, named=False)


def test_a_dry_run_prints_what_the_run_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", *AGENT, *TINY_STEPS, "--skip-checks", "env", "--no-save-model", "--run-dir", str(tmp_path / "run")]
    assert main([*words, "--dry-run"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "run").exists()
    code, output = forked.run(words, {}, 100)
    assert code == 0, output
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == printed
    assert printed["engine"]["engine"] == "transformers"
    assert printed["rollout"]["rollout_workers_per_engine"] == 1
    assert (printed["sources"]["engine"], printed["sources"]["num_steps"]) == ("machine", "flag")


@pytest.mark.parametrize("name", ["shapes", "picture_grid"])
def test_an_environment_that_shows_pictures_takes_the_bundled_model_that_reads_them(name: str) -> None:
    agent = ["--agent", f"envs/{name}.py"]
    plan = RunPlan.of(read_train(agent), named=False)
    assert (plan.settings.model.model, plan.sources["model"]) == (located_model(VISION_MODEL), "settings")
    assert f"model {CHOSEN_VISION}" in plan.notes
    named = RunPlan.of(read_train([*agent, "--model", str(tiny_model_path())]), named=False)
    assert named.settings.model.model == str(tiny_model_path())
    assert plan_of().settings.model.model == ""


def test_each_setting_has_its_source(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("groups_per_step = 4\nseed = 3\n")
    plan = plan_of("--config", str(tmp_path / "settings.toml"), "--seed", "5", "--optimizer", "muon", "--async", "--lora-rank", "0")
    sources = {name: plan.sources[name] for name in ("groups_per_step", "seed", "zero_stage", "max_staleness", "runtime", "engine")}
    assert sources == {
        "groups_per_step": "file",
        "seed": "flag",
        "zero_stage": "optimizer",
        "max_staleness": "settings",
        "runtime": "settings",
        "engine": "machine",
    }
    assert plan.settings.learner.zero_stage == 0
    assert "eval_size" not in plan.sources


def test_a_size_of_the_model_decides_what_nobody_gave() -> None:
    plan = plan_of("--model", "nobody/has-this-model", "--max-new-tokens", "64")
    assert (plan.settings.learner.learning_rate, plan.sources["learning_rate"]) == (1e-6, "model")
    assert (plan.settings.rollout.max_new_tokens, plan.sources["max_new_tokens"]) == (64, "flag")


def test_the_machine_decides_the_workers_of_an_engine() -> None:
    words = ("--max-staleness", "3", "--n-samples-per-prompt", "128", "--groups-per-step", "64")
    workers = [plan_of(*words, host=Machine(cores)).settings.rollout.rollout_workers_per_engine for cores in (2, 16)]
    assert workers == [1, 14]


def test_a_cluster_that_is_not_joined_yet_leaves_its_cores_open(tmp_path: Path) -> None:
    plan = RunPlan.of(read_train([*AGENT, "--ray-address", "somewhere:6379", "--run-dir", str(tmp_path / "run")]))
    assert plan.settings.rollout.rollout_workers_per_engine == "auto"
    assert any(line.startswith("known once the cluster is joined: --device, ") for line in preview(plan))
    assert plan.settings.engine.engine == "vllm"


def test_python_has_the_settings_of_the_command() -> None:
    assert agentrl.settings("envs/arithmetic.py", num_steps=7) == changed(plan_of("--num-steps", "7").settings)


def test_rules_come_before_folders_and_environments(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    taken = ["--agent", "envs/arithmetic.py", "--run-dir", str(tmp_path / "run")]
    with pytest.raises(ConfigError, match="--zero-stage"):
        RunPlan.of(read_train([*taken, "--optimizer", "muon", "--zero-stage", "1"]))
    with pytest.raises(ConfigError, match="already holds a run"):
        RunPlan.of(read_train(taken))


def test_the_directory_is_made_and_held_when_the_plan_is_carried_out(tmp_path: Path) -> None:
    plan = RunPlan.of(read_train([*AGENT, "--run-dir", str(tmp_path / "run")]))
    assert not (tmp_path / "run").exists()
    with plan.in_directory() as held:
        assert held == plan
        with pytest.raises(ConfigError, match=r"--run-dir = .*run"), plan.in_directory():
            pass
    assert plan.resuming().settings.training.resume == str(tmp_path / "run")


def test_what_one_machine_decided_another_decides_again(tmp_path: Path) -> None:
    """A run on one GPU shares it between engine and learner; it can go on where there is none."""
    begun = changed(load_config(AGENT), colocate=True, sleep_level=0, groups_per_step=4)
    sources = {"groups_per_step": "flag", "colocate": "machine", "sleep_level": "machine", "engine": "machine"}
    plan = RunPlan(settings=begun, sources=sources, agent=plan_of().agent, device="cpu")
    (tmp_path / "config.json").write_text(plan.to_json())
    again = read_train(with_saved_settings(["--resume", str(tmp_path)]))
    assert not again.settings.weights.colocate
    assert again.settings.weights.sleep_level == 1
    assert again.sources == {"groups_per_step": "flag", "engine": "machine", "resume": "flag"}
    assert "sources" not in flattened(json.loads(plan.to_json()))
    assert from_mapping(TrainConfig, json.loads(plan.to_json())) == begun


def test_steps_say_what_they_changed() -> None:
    settings = load_config(AGENT)
    steps = Steps(settings, {"seed": "flag"}).fill("model", seed=9, num_steps=3)
    assert steps.settings.run.seed == 0
    assert steps.sources == {"seed": "flag", "num_steps": "model"}
    assert steps.rewrite(changed(settings, model="/elsewhere")).sources == steps.sources
    options = changed(settings, eps_clip_low=0.1)
    assert list(names_that_differ(settings, options)) == ["eps_clip_low"]


def test_a_shared_gpu_is_divided_by_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.core.process.cuda_device_count", lambda: 1)
    plan = plan_of()
    assert plan.settings.weights.colocate
    assert plan.settings.weights.learner_memory_gib > 0
    assert plan.sources["learner_memory_gib"] == "machine"


def test_a_directory_in_which_a_run_ended_meanwhile_is_refused(tmp_path: Path) -> None:
    plan = plan_of("--run-dir", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="already holds a run"), plan.in_directory():
        pass
