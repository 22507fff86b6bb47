"""Settings of sandboxes."""

import shutil
from pathlib import Path

import pytest

from agentrl.cluster.plan import RunConfig
from agentrl.config.rules import ISOLATION_RULES
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError
from agentrl.env.sandbox.spec import SandboxChoice
from agentrl.resolve.parts import episode_plan


def check(agent: str, **values: object) -> None:
    config = changed(TrainConfig(run=RunConfig(agent=agent)), **values)
    for rule in ISOLATION_RULES:
        rule(config)


def test_settings_reach_the_environments() -> None:
    config = changed(TrainConfig(), sandbox="none")
    assert episode_plan(config).env.sandbox == SandboxChoice(kind="none")
    config = changed(TrainConfig(), sandbox_read=("/opt/tools",))
    assert episode_plan(config).env.sandbox == SandboxChoice(read=("/opt/tools",))
    config = changed(TrainConfig(), sandbox="container", sandbox_image="./box", run_dir=Path("runs/one"))
    assert episode_plan(config).env.sandbox == SandboxChoice(kind="container", image="./box", run="runs/one")


def test_all_workers_of_a_run_name_its_places_alike() -> None:
    def places(**values: object) -> str:
        return episode_plan(changed(TrainConfig(), **values)).env.sandbox.places

    assert places(run_dir=Path("runs/one")) == ""
    assert places(sandbox_max_running=2, run_dir=Path("runs/one")) == "runs/one"
    assert places(sandbox_max_running=2) == places(sandbox_max_running=2) != places(sandbox_max_running=2, agent="b.py")


def test_without_bubblewrap_programs_are_refused_and_other_environments_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    check("env.py")
    check("command:ls {prompt}#judge=true", sandbox="none")
    for agent in ("command:ls {prompt}#judge=true", "harbor:tasks#agent=ls {prompt}"):
        with pytest.raises(ConfigError, match="runs programs, and there is no bwrap") as caught:
            check(agent)
        assert caught.value.field == "--sandbox"
        with pytest.raises(ConfigError, match=r"runs programs, and there is no podman or docker.*apt-get install podman"):
            check(agent, sandbox="container")


def test_a_path_is_absolute_and_needs_a_wall() -> None:
    check("env.py", sandbox_read=("/opt/tools",))
    with pytest.raises(ConfigError, match="is no absolute path"):
        check("env.py", sandbox_read=("tools",))
    with pytest.raises(ConfigError, match="has no effect without a wall"):
        check("env.py", sandbox="none", sandbox_read=("/opt/tools",))


@pytest.mark.linux
def test_an_endpoint_with_a_certificate_is_not_given_behind_a_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    for values in ({"endpoint_certificate": "cert.pem"}, {"endpoint_url": "https://trainer:{port}"}):
        check("env.py", **values)
        check("command:ls {prompt}#judge=true", sandbox_network="all", **values)
        check("harbor:tasks", **values)
        for agent in ("command:ls {prompt}#judge=true", "harbor:tasks#harness=codex"):
            with pytest.raises(ConfigError, match="which no certificate is for"):
                check(agent, **values)


def test_an_image_is_for_containers() -> None:
    check("env.py", sandbox="container", sandbox_image="debian")
    with pytest.raises(ConfigError, match="has no effect without containers"):
        check("env.py", sandbox_image="debian")
