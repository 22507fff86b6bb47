"""Settings of environments in processes of their own."""

import dataclasses

import pytest

from agentrl.config.rules import ISOLATION_RULES
from agentrl.config.schema import TrainConfig
from agentrl.core import operating_system
from agentrl.core.errors import ConfigError
from agentrl.env.isolation.system import ProcessLimits, child_environment
from agentrl.env.plan import LEAST_LIMITS, IsolationConfig
from agentrl.rollout.episode_plan import process_limits


def config(**values: object) -> TrainConfig:
    return TrainConfig(isolation=IsolationConfig(**values))  # type: ignore[arg-type]


def check(**values: object) -> None:
    for rule in ISOLATION_RULES:
        rule(config(**values))


def test_defaults_agree_and_reach_the_processes() -> None:
    assert process_limits(config().isolation) is None
    assert process_limits(config(env_isolation="process").isolation) == ProcessLimits()
    changed = process_limits(
        config(env_isolation="process", env_limits=("memory_mib=1", "cpu_s=2", "file_mib=3", "processes=4"), env_pass=("A",)).isolation
    )
    assert changed == ProcessLimits(memory_mib=1, cpu_s=2.0, file_mib=3, processes=4, passed=("A",))
    assert {item.name for item in dataclasses.fields(ProcessLimits)} == {*LEAST_LIMITS, "reuse", "passed"}


@pytest.mark.parametrize(
    ("limit", "problem"),
    [
        ("memory=5", "'memory': is no limit"),
        ("open_files=15", "an integer from 16"),
        ("processes=1.5", "an integer from 0"),
        ("cpu_s=0", "above 0"),
    ],
)
def test_a_wrong_limit_is_refused(limit: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config(env_isolation="process", env_limits=(limit,))


@pytest.mark.linux
@pytest.mark.parametrize(("name", "value"), [("env_limits", ("memory_mib=5",)), ("env_pass", ("HOME",)), ("env_reuse", 3)])
def test_a_limit_without_isolation_is_refused(name: str, value: object) -> None:
    check(env_isolation="process", **{name: value})
    with pytest.raises(ConfigError, match="has no effect") as caught:
        check(**{name: value})
    assert caught.value.field == f"--{name.replace('_', '-')}"


@pytest.mark.linux
def test_a_value_in_place_of_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="names only"):
        check(env_isolation="process", env_pass=("KEY=value",))


def test_isolation_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operating_system, "SYSTEM", "darwin")
    check()
    with pytest.raises(ConfigError, match="needs Linux"):
        check(env_isolation="process")


def test_variables_are_kept_by_name() -> None:
    given = {"PATH": "p", "PYTHONPATH": "q", "LC_ALL": "C", "MINE": "m"}
    secrets = dict.fromkeys(["OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "AGENTRL_API_KEY"], "s")
    assert child_environment(given | secrets, ("MINE",)) == {"PYTHONHASHSEED": "0", **given}
