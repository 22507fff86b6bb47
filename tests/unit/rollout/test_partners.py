"""Agents that another model, a service or earlier weights play."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from agentrl.assets import tiny_model_path
from agentrl.check.tokenizer import load_codec
from agentrl.cluster.plan import RunConfig
from agentrl.config.load import load
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.core.paths import past_folder
from agentrl.core.protocols import Engine
from agentrl.core.types import Group, GroupRequest, Status, Task
from agentrl.resolve.commands import TRAIN
from agentrl.resolve.parts import environment, episode_plan
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.partner_specs import check_partners, partner_specs, past_steps
from agentrl.rollout.plan import ModelConfig, PartnerConfig
from agentrl.rollout.worker import EpisodeWorker
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.servers import Request, serve
from tests.unit.check.support import settings_of

pytestmark = pytest.mark.anyio

ENV = """
from agentrl import AgentInstance, ResetResult, StepResult, Task

class Talk(AgentInstance):
    agents = ("ann", "bob")

    @classmethod
    def tasks(cls):
        return [Task("Talk.", id="t")]

    def reset(self, state):
        self.said = []
        return ResetResult("Begin.", observations={name: f"You are {name}." for name in self.agents})

    def step(self, state):
        self.said.append(f"{state.agent} said {state.action_text}")
        if state.turn == 3:
            assert self.said == ["ann said mine", "bob said theirs", "ann said mine", "bob said theirs"], self.said
            return StepResult(1.0, terminated=True, rewards={"ann": 0.5})
        return StepResult(0.0, self.said[-1])
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "talk.py"
    path.write_text(ENV)
    return path


class Made:
    """Makes engines that say a text, and remembers for which models."""

    def __init__(self, file: Path) -> None:
        self._codec, self.models, self.engines = load_codec(settings_of(str(file))), list[str](), list[ScriptedEngine]()

    def says(self, text: str) -> ScriptedEngine:
        ids = [*self._codec.encode_text(text), *self._codec.turn_end_ids]
        return ScriptedEngine(answer=lambda request: ids, max_model_len=1024, end_token_ids=self._codec.end_token_ids)

    def __call__(self, model: str) -> Engine:
        self.models.append(model)
        self.engines.append(self.says("theirs"))
        return self.engines[-1]


async def played(file: Path, partner: str, requests: list[GroupRequest], made: Made | None = None, **more: Any) -> list[Group]:
    made = made or Made(file)
    partner += "#every=10&pool=2" if partner.endswith("=past") else ""
    settings = EpisodePlan(model=ModelConfig(model=str(tiny_model_path())), partner=PartnerConfig(partner=(partner,)), **more)
    worker = EpisodeWorker(made.says("mine"), load_agent(str(file)), settings, partner_engine=made)
    await worker.start()
    try:
        return [(await worker.run_group(request))[1] for request in requests]
    finally:
        await worker.close()


def wanted(version: int = 0, name: str = "t") -> GroupRequest:
    return GroupRequest(group_id=0, task=Task("Talk.", id=name), n_samples_per_prompt=2, version=version)


async def test_another_model_plays_an_agent_which_is_not_trained(file: Path) -> None:
    made = Made(file)
    (group,) = await played(file, f"bob=model:{tiny_model_path()}", [wanted()], made)
    assert [(each.agent, each.frozen, each.reward, each.status) for each in group.trajectories[:2]] == [
        ("ann", False, 0.5, Status.FINISHED),
        ("bob", True, 1.0, Status.FINISHED),
    ]
    assert made.models == [str(tiny_model_path())]
    assert len(made.engines[0].requests) == 4


async def test_a_service_is_asked_with_the_messages_so_far(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def handler(request: Request) -> None:
        await request.answer({"choices": [{"message": {"role": "assistant", "content": "theirs"}}]})

    monkeypatch.setenv("PARTNER_KEY", "secret")
    async with serve(handler) as server:
        (group,) = await played(file, f"bob=endpoint:{server.url}/v1#model=big&api_key_env=PARTNER_KEY", [wanted()])
    assert {each.status for each in group.trajectories} == {Status.FINISHED}
    bodies = sorted((request.json for request in server.requests), key=lambda body: len(body["messages"]))
    assert bodies[0]["messages"] == [{"role": "user", "content": "You are bob.\nann said mine"}]
    assert [message["role"] for message in bodies[-1]["messages"]] == ["user", "assistant", "user"]
    assert {body["model"] for body in bodies} == {"big"}
    assert server.requests[0].headers["authorization"] == "Bearer secret"


async def test_a_service_that_fails_is_a_failed_episode(file: Path) -> None:
    async def handler(request: Request) -> None:
        await request.answer({"error": "no such model"}, status=404)

    async with serve(handler) as server:
        (group,) = await played(file, f"bob=endpoint:{server.url}/v1#model=big", [wanted()])
    assert {each.status for each in group.trajectories} == {Status.ENV_ERROR}
    assert "--partner bob" in str(group.trajectories[0].error)


async def test_a_group_plays_against_one_of_the_newest_earlier_weights(file: Path, tmp_path: Path) -> None:
    made, names = Made(file), [str(number) for number in range(12)]
    requests = [wanted(0), wanted(10), *(wanted(35, name) for name in names)]
    groups = await played(file, "bob=past", requests, made, partner_folder=str(tmp_path))
    steps = [group.trajectories[0].metrics["partner_step"] for group in groups]
    assert steps[:2] == [0.0, 0.0]
    assert set(steps[2:]) == {20.0, 30.0}
    assert {made.models[0], *made.models[1:]} == {str(tiny_model_path()), *(str(past_folder(tmp_path, step)) for step in (20, 30))}
    again = await played(file, "bob=past", requests[2:], partner_folder=str(tmp_path))
    assert [group.trajectories[0].metrics["partner_step"] for group in again] == steps[2:]
    for group in groups:
        assert len({each.metrics["partner_step"] for each in group.trajectories}) == 1


async def test_without_a_run_the_policy_plays_itself(file: Path) -> None:
    made = Made(file)
    (group,) = await played(file, "bob=past", [wanted(50)], made)
    assert made.models == []
    assert group.trajectories[1].status is Status.ENV_ERROR  # in which bob says what ann says


def test_weights_of_a_step_are_played_against_from_the_next_version_on() -> None:
    assert past_steps(0, 10, 3) == past_steps(10, 10, 3) == [0]
    assert past_steps(11, 10, 3) == [0, 10]
    assert past_steps(45, 10, 3) == [20, 30, 40]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("bob", "does not say who plays"),
        ("bob=past:x", "does not say who plays"),
        ("bob=model:", "does not say who plays"),
        ("bob=model:./nowhere", "no such directory"),
        ("bob=endpoint:http://h/v1", "with the name of its model"),
        ("bob=endpoint:ftp://h/v1#model=m", "is not the address"),
        ("bob=past,bob=past", "names the agent 'bob' twice"),
    ],
)
def test_a_wrong_partner_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        partner_specs(PartnerConfig(partner=tuple(text.split(","))))


def test_partners_must_fit_the_environment(file: Path) -> None:
    def config(*partner: str) -> TrainConfig:
        return dataclasses.replace(TrainConfig(run=RunConfig(agent=str(file))), partner=PartnerConfig(partner=partner))

    environment(config("bob=past"))
    with pytest.raises(ConfigError, match=r"is no agent of Talk. Its agents are ann, bob"):
        environment(config("eve=past"))
    with pytest.raises(ConfigError, match="leaves no agent of Talk to train"):
        environment(config("bob=past", "ann=past"))
    with pytest.raises(ConfigError, match="has a single agent"):
        check_partners(PartnerConfig(partner=("bob=past",)), (), [""], "Sums")


def test_the_pool_is_kept_in_the_directory_of_the_run(file: Path, tmp_path: Path) -> None:
    words = ["--agent", str(file), "--run-dir", str(tmp_path / "run")]
    config = load(TRAIN, [*words, "--partner", "bob=past"])
    assert episode_plan(config).partner_folder == str(tmp_path / "run" / "partners")
    assert episode_plan(load(TRAIN, [*words, "--partner", f"bob=model:{tiny_model_path()}"])).partner_folder == ""
    for wrong in ("every=0", "pool=two", "each=3", ""):
        with pytest.raises(ConfigError, match="does not say after how many steps weights are kept"):
            load(TRAIN, [*words, "--partner", f"bob=past#{wrong}"])
    with pytest.raises(ConfigError, match="keeps earlier weights of a run in two ways"):
        load(TRAIN, [*words, "--partner", "bob=past", "ann=past#every=5"])
