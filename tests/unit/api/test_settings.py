"""Settings given in Python: the flags' names, the flags' checks and the flags' messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.api.settings import environment, eval_settings
from agentrl.core.errors import ConfigError, EnvLoadError
from agentrl.resolve.commands import load_config, load_eval
from tests.given import train_settings

ROOT = Path(__file__).parents[3]
AGENT = str(ROOT / "envs" / "arithmetic.py")

SAME = [
    ({}, []),
    ({"num_steps": 3, "learning_rate": 1e-3}, ["--num-steps", "3", "--learning-rate", "0.001"]),
    ({"async_": True}, ["--async"]),
    ({"async": True}, ["--async"]),
    ({"asynchronous": True}, ["--async"]),
    ({"max_staleness": 1}, ["--max-staleness", "1"]),
    ({"stop": ["a", "b"]}, ["--stop", "a", "b"]),
    ({"off_policy_range": [0.5, 2]}, ["--off-policy-range", "0.5", "2"]),
    ({"run_dir": Path("x"), "save_model": False}, ["--run-dir", "x", "--no-save-model"]),
    ({"actor_learning_rate": 1e-3, "eps_clip": 0.1}, ["--actor-learning-rate", "0.001", "--eps-clip", "0.1"]),
]
WRONG = [
    ({"num_steps": 0}, ["--num-steps", "0"]),
    ({"groups_per_step": -1}, ["--groups-per-step", "-1"]),
    ({"temperature": 9.0}, ["--temperature", "9.0"]),
    ({"n_samples_per_prompt": 1}, ["--n-samples-per-prompt", "1"]),
    ({"async_": True, "max_staleness": 0}, ["--async", "--max-staleness", "0"]),
    ({"model": "/no/such/model"}, ["--model", "/no/such/model"]),
    ({"prompts": Path("none.jsonl")}, ["--prompts", "none.jsonl"]),
    ({"runtime": "local", "num_engines": 2}, ["--runtime", "local", "--num-engines", "2"]),
    ({"resume": "/no/such/run"}, ["--resume", "/no/such/run"]),
]


def message(function: Any, *arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*arguments)
    return str(caught.value)


def from_flags(words: list[str]) -> Any:
    from agentrl.resolve.saved import with_saved_settings

    return load_config(with_saved_settings(["--agent", AGENT, *words]))


@pytest.mark.parametrize(("given", "words"), SAME)
def test_settings_mean_what_the_flags_mean(given: dict[str, Any], words: list[str]) -> None:
    assert train_settings(AGENT, given) == from_flags(words)


@pytest.mark.parametrize(("given", "words"), WRONG)
def test_errors_are_those_of_the_flags(given: dict[str, Any], words: list[str]) -> None:
    assert message(train_settings, AGENT, given) == message(from_flags, words)


def test_unknown_names_get_the_nearest() -> None:
    assert message(train_settings, AGENT, {"max_stalenes": 1}) == "max_stalenes = 1: is not a setting. Did you mean `max_staleness`?"
    assert "Did you mean `async_`?" in message(train_settings, AGENT, {"asyncc": True})
    assert "`agentrl eval --help all` lists every setting" in message(eval_settings, AGENT, {"zzz": 1})
    assert "Did you mean `episodes`?" in message(lambda: agentrl.check(AGENT, episode=1))
    assert "--episodes" in message(lambda: agentrl.check(AGENT, episodes=0))


def test_a_file_gives_the_others(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(f'agent = "{AGENT}"\nnum_steps = 7\n[learner]\nlearning_rate = 0.5\n')
    config = train_settings("", {"config": path, "num_steps": 3})
    assert (config.run.agent, config.training.num_steps, config.learner.learning_rate) == (AGENT, 3, 0.5)
    assert message(train_settings, "", {}).startswith("--agent = ''")


def test_an_evaluation_has_the_flags_of_its_command() -> None:
    given = {"eval_samples": 2, "n_samples_per_prompt": 2} | {"num_tasks": 3, "baseline": "start", "temperature": 0.5}
    assert "is given twice" in message(eval_settings, AGENT, given)
    del given["n_samples_per_prompt"]
    words = ["--eval-samples", "2", "--num-tasks", "3", "--baseline", "start", "--temperature", "0.5"]
    assert eval_settings(AGENT, given) == load_eval(["--agent", AGENT, *words])
    assert "is not a setting" in message(eval_settings, AGENT, {"gamma": 0.9})
    assert message(eval_settings, AGENT, {"eval_samples": 0}) == message(load_eval, ["--agent", AGENT, "--eval-samples", "0"])
    assert message(eval_settings, "", {"run": "/no/run"}) == message(load_eval, ["--run", "/no/run"])


class Local(agentrl.AgentInstance):
    def step(self, state: agentrl.StepState, /) -> agentrl.StepResult:
        return agentrl.StepResult(0.0, terminated=True)


def test_what_an_environment_may_be(tmp_path: Path) -> None:
    assert environment("gym:FrozenLake-v1") == "gym:FrozenLake-v1"
    assert environment(tmp_path / "env.py") == str(tmp_path / "env.py")
    assert environment(agentrl.GymEnv) == "agentrl.suites.gymnasium:GymEnv"
    assert environment(Local) == f"{__name__}:Local"

    class Inner(Local):
        pass

    assert environment(Inner) == "python:Inner"
    assert environment(lambda completion, label: 1.0) == "python:reward"
    with pytest.raises(EnvLoadError, match="is a Local, not a class"):
        agentrl.train(Local(), run_dir=tmp_path / "run", runtime="local")
    with pytest.raises(EnvLoadError, match="as an object in Python code, which this process does not have"):
        agentrl.train("python:Elsewhere", run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.linux
def test_what_cannot_be_sent_is_named_before_anything_starts(tmp_path: Path) -> None:
    code = f"""
import threading, agentrl
lock = threading.Lock()
class Locked(agentrl.AgentInstance):
    def step(self, state):
        with lock:
            return agentrl.StepResult(0.0, terminated=True)
class Large(agentrl.AgentInstance):
    table = bytes(100_000)
    def step(self, state):
        return agentrl.StepResult(0.0, terminated=True)
for env, settings in ((Locked, dict()), (Large, dict(runtime="local", env_isolation="process"))):
    try:
        agentrl.train(env, run_dir={str(tmp_path / "run")!r}, **settings)
    except agentrl.EnvLoadError as error:
        print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.count("\n") == 2, result.stdout + result.stderr
    first, second = result.stdout.splitlines()
    assert all(words in first for words in ("python:Locked", "the variable lock, which it uses, is a lock", "inside reset"))
    assert all(words in second for words in ("python:Large", "sends 60,000 at most"))
    assert not (tmp_path / "run").exists()
