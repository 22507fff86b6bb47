"""Joining a cluster: addresses that nobody answers, the files and variables that travel, and paths that a machine lacks."""

from __future__ import annotations

import asyncio
import pickle
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.cluster import joining
from agentrl.cluster.build import actor_environment
from agentrl.cluster.joining import Site, check_paths, find_cluster, pack, traveling_environment
from agentrl.cluster.ray_actors import interface_of
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError
from agentrl.resolve.commands import load_config
from agentrl.resolve.parts import cluster_plan
from agentrl.suites.load import load_agent

AGENT = """
from agentrl import AgentInstance, StepResult
from words import WORD

class Say(AgentInstance):
    def step(self, state):
        return StepResult(float(WORD in state.action_text), terminated=True)
"""


@pytest.mark.parametrize(
    ("address", "problem"),
    [("127.0.0.1:9", "nobody listens"), ("somewhere", "host:port"), ("ray://127.0.0.1:10001", "Ray client")],
)
def test_an_address_without_a_cluster_is_one_error_that_names_the_flag(address: str, problem: str) -> None:
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=f"^--ray-address = .*{problem}"):
        asyncio.run(find_cluster(address))
    assert time.monotonic() - begin < 10


def test_a_listener_that_is_no_cluster_is_given_up_after_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "ANSWER_TIMEOUT_S", 3.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        begin = time.monotonic()
        with pytest.raises(ConfigError, match="does not answer as a Ray cluster within 3 s"):
            asyncio.run(find_cluster(f"127.0.0.1:{other.getsockname()[1]}"))
    assert time.monotonic() - begin < 10


def test_the_clock_of_the_answer_begins_when_ray_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "ANSWER_TIMEOUT_S", 1.0)
    slow = 'import time; time.sleep(2); print("imported", flush=True); print("asked h:1"); print("answered 2.60")'
    monkeypatch.setattr(joining, "_ASK", slow)
    assert asyncio.run(find_cluster("auto")) == "h:1"


@pytest.mark.parametrize(
    ("complaint", "said"),
    [
        ("E 12:00 log\nray.exceptions.AuthenticationError: Token authentication is enabled", "refuses this machine"),
        ("RuntimeError: Version mismatch: 2.60.0 and 2.50.0\n", "Version mismatch"),
    ],
)
def test_a_refusal_says_why(complaint: str, said: str) -> None:
    assert said in str(joining._no_answer("h:1", complaint))


def config_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    (folder / "agent.py").write_text(AGENT)
    (folder / "words.py").write_text("WORD = 'yes'\n")
    (folder / "loss.py").write_text("import agentrl\n\n@agentrl.policy_loss\ndef loss(inputs, options):\n    return -inputs.logprobs\n")
    (folder / "large.bin").write_bytes(b"x" * (joining.MAX_FILE + 1))
    monkeypatch.chdir(folder)
    return load_config(["--agent", "agent.py", "--policy-loss", "loss.py:loss", "--run-dir", "run"])


def test_relative_files_work_where_the_folder_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    sent, site = pack(cluster_plan(config_of(home, monkeypatch)))
    assert sent.run.agent == str(home / "agent.py")
    assert sent.run_dir == home / "run"  # where the ranks write
    assert set(site.folders[str(home)]) == {"agent.py", "words.py", "loss.py"}
    sent, site = pickle.loads(pickle.dumps((sent, site)))
    assert site.settled(sent) == sent  # the same files are there
    shutil.rmtree(home)
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    settled = site.settled(sent)
    assert settled.run.agent.startswith(str(elsewhere))
    assert Path(settled.learner.algo.policy_loss.rpartition(":")[0]).read_text().startswith("import agentrl")
    assert load_agent(settled.run.agent).load().__name__ == "Say"


def test_a_machine_with_other_files_gets_those_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, site = pack(cluster_plan(config_of(tmp_path, monkeypatch)))
    (tmp_path / "words.py").write_text("WORD = 'old'\n")
    settled = site.settled(sent)
    assert settled.run.agent != sent.run.agent
    assert (Path(settled.run.agent).parent / "words.py").read_text() == "WORD = 'yes'\n"


def test_variables_that_matter_travel_and_secrets_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NCCL_DEBUG": "INFO", "HF_HOME": "/models", "HF_TOKEN": "canary", "EDITOR": "vi", "OMP_NUM_THREADS": "3"}.items():
        monkeypatch.setenv(name, value)
    found = traveling_environment(actor_environment(cluster_plan(TrainConfig(), "cuda")))
    assert (found["NCCL_DEBUG"], found["HF_HOME"], found["OMP_NUM_THREADS"]) == ("INFO", "/models", "3")
    assert found["DS_ACCELERATOR"] == "cuda"  # the cluster's kind of device, not this machine's
    assert "EDITOR" not in found
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("HTTP_PROXY", "http://user:canary@proxy:3128")
    found = traveling_environment(actor_environment(cluster_plan(TrainConfig(), "cuda")))
    assert found["HTTPS_PROXY"] == "http://proxy:3128"
    assert "canary" not in found.values()


class Actor:
    """Answers as an actor does; it has every path but those with one of some words in it."""

    def __init__(self, *lacks: str) -> None:
        self.missing = SimpleNamespace(remote=self._missing)
        self.in_memory = SimpleNamespace(remote=self._in_memory)
        self.lacks = lacks

    async def _missing(self, paths: list[str]) -> tuple[str, list[str]]:
        return "10.0.0.7", [path for path in paths if any(word in path for word in self.lacks)]

    async def _in_memory(self) -> str:
        return "/dev/shm/probe-1"


@pytest.mark.parametrize(
    ("worker", "rank", "front_end", "told"),
    [
        (Actor(), Actor(), Actor("/dev/shm", ".probe-"), None),  # one with episodes alone reads no weights
        (Actor("tiny"), Actor(), Actor(), "--model = .*engine-0 on 10.0.0.7 does not see"),
        (Actor(), Actor(), Actor("tiny"), "--model = .*engine-0 worker-0 on 10.0.0.7 does not see"),
        (Actor(), Actor(".probe-"), Actor(), "--run-dir = .*learner-0 on 10.0.0.7 does not see .*all machines share"),
        (Actor("/dev/shm"), Actor(), Actor(), "--ray-address = .*engine-0 .*shared memory"),
    ],
)
def test_a_machine_that_lacks_a_path_is_named_with_the_flag(
    tmp_path: Path, worker: Actor, rank: Actor, front_end: Actor, told: str | None
) -> None:
    plan = cluster_plan(changed(TrainConfig(), model="/models/tiny", run_dir=tmp_path), "cpu")
    check = check_paths(plan, tmp_path, {"engine-0": worker}, {"learner-0": rank}, {"engine-0 worker-0": front_end})
    if told is None:
        asyncio.run(check)
    else:
        with pytest.raises(ConfigError, match=told):
            asyncio.run(check)
    assert not list(tmp_path.iterdir())


def test_the_interface_of_a_loopback_address_is_that_of_loopback() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.2") != ""
    assert interface_of("203.0.113.1") == ""


def test_an_empty_site_changes_nothing() -> None:
    plan = cluster_plan(TrainConfig())
    assert Site().settled(plan) == plan
