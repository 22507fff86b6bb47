"""An environment gets the same from a check, from play, from replay and in a process of its own as it gets in training."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl.assets import tiny_model_path
from agentrl.check.play import make_player, repeating
from agentrl.check.probe import Watch
from agentrl.check.tokenizer import load_codec
from agentrl.cluster.plan import RunConfig
from agentrl.config.schema import TrainConfig
from agentrl.core.protocols import EngineLimits, GenerationRequest
from agentrl.core.types import GroupRequest, Status, Task
from agentrl.engine.plan import EngineConfig
from agentrl.env.agent import ResetState, StepState
from agentrl.env.agent_spec import AgentSpec
from agentrl.env.plan import IsolationConfig
from agentrl.env.tasks import TaskSource
from agentrl.inspect.compare import Verdict
from agentrl.inspect.play import PlaySession
from agentrl.inspect.replay import Replayer
from agentrl.resolve.parts import cluster_plan, episode_plan
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.plan import ModelConfig, RolloutConfig
from agentrl.rollout.tasks import open_tasks
from agentrl.rollout.worker import EpisodeWorker
from agentrl.suites.load import load_agent
from agentrl.track.text import Screen
from tests.scripted_engine import ScriptedEngine
from tests.unit.check.support import checked, ids, settings_of

MODEL = str(tiny_model_path())
TEXTS = ["7", "eleven or so"]
MAX_LEN = 512
CODEC = load_codec(settings_of("", model=MODEL))

SPY = '''
import dataclasses
import json
from pathlib import Path

from agentrl import AgentInstance, ResetResult, StepResult, Task
from agentrl.env.agent import ResetState, StepState
from openrlhf.utils.agent import AgentInstanceBase

SEEN = Path(__file__).with_suffix(".jsonl")


def note(state):
    """Every attribute of the state's type; where a task stands in the order of a run is left out, because a check has none."""
    names = [name for name, value in vars(type(state)).items() if isinstance(value, property)]
    values = {name: getattr(state, name) for name in names}
    assert {**state} == values
    values["task"] = dataclasses.replace(values["task"], position=0)
    with SEEN.open("a") as file:
        file.write(json.dumps([type(state).__name__, {name: repr(value) for name, value in values.items()}]) + "\\n")


TASKS = [Task("How much is 3+4?", label="7", id="sum", metadata={"kind": "sum"})]


class Typed(AgentInstance):
    @classmethod
    def tasks(cls):
        return TASKS

    def reset(self, state):
        note(state)
        return ResetResult("What is 3+4?", sampling={"max_tokens": 64})

    def step(self, state):
        note(state)
        return StepResult(0.5, f"No. {state.turns_left} left.", terminated=state.turn == 1, sampling={"temperature": 0.5})


class Pair(Typed):
    agents = ("asker", "teller")

    def reset(self, state):
        note(state)
        return ResetResult(agent="teller", observations={"asker": "You ask."})


class Dictionaries(AgentInstanceBase):
    tasks = TASKS

    async def __init__(self, *args, **kwargs):
        self.count = 0

    async def reset(self, states, **kwargs):
        note(states)
        return {"observation": states["observation"] + "Well"}

    async def step(self, states, **kwargs):
        note(states)
        self.count += 1
        return {"rewards": 0.5, "environment_feedback": "<|user|>No.<|end|><|assistant|>", "done": self.count == 2}
'''


def config_of(spec: AgentSpec, isolation: str = "none") -> TrainConfig:
    return TrainConfig(
        run=RunConfig(agent=spec.spec, seed=3),
        model=ModelConfig(model=MODEL),
        rollout=RolloutConfig(max_turns=3, max_new_tokens=100),
        engine=EngineConfig(max_model_len=MAX_LEN),
        isolation=IsolationConfig(env_isolation=isolation),  # type: ignore[arg-type]
    )


def spy(folder: Path, name: str) -> AgentSpec:
    (folder / "spy.py").write_text(SPY)
    return load_agent(f"{folder / 'spy.py'}:{name}")


def seen(spec: AgentSpec) -> list[Any]:
    """What was noted since the last look."""
    path = Path(spec.source).with_suffix(".jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    return lines


def says(codec: ChatCodec) -> ScriptedEngine:
    left = iter(TEXTS)

    def answer(request: GenerationRequest) -> list[int]:
        return [*codec.encode_text(next(left)), *codec.turn_end_ids]

    return ScriptedEngine(answer=answer, max_model_len=MAX_LEN, end_token_ids=codec.end_token_ids)


async def train(spec: AgentSpec, task: Task, settings: EpisodePlan) -> list[dict[str, Any]]:
    """Play in the worker of a run; returns its records."""
    worker = EpisodeWorker(says(CODEC), spec, settings)
    await worker.start()
    try:
        summary, group = await worker.run_group(GroupRequest(group_id=0, task=task, n_samples_per_prompt=1, version=0, record=1))
        assert [trajectory.status for trajectory in group.trajectories] == [Status.FINISHED] * len(group.trajectories)
        return [dict(record) for record in summary.records]
    finally:
        await worker.close()


async def replay(spec: AgentSpec, records: list[dict[str, Any]], settings: EpisodePlan) -> None:
    replayer = Replayer(
        spec,
        settings,
        make_codec=lambda ends: CODEC,
        find_task=lambda name: None,
        limits=EngineLimits(max_model_len=MAX_LEN, end_token_ids=CODEC.end_token_ids),
    )
    await replayer.start()
    outcome = await replayer.replay(records)
    assert outcome.verdict is Verdict.SAME, outcome
    await replayer.close()


def play(spec: AgentSpec, source: TaskSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be the policy on standard input."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(TEXTS) + "\n"))
    options = {"model": False, "pause": False, "episodes": 1, "tokens": False, "logprobs": False}
    assert PlaySession(cluster_plan(config_of(spec)), spec, source, Screen(Console(file=io.StringIO())), **options).run() == 0


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["Typed", "Pair", "Dictionaries"])
async def test_every_attribute_is_that_of_training(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spy(tmp_path, name)
    config = config_of(spec)
    task, settings = open_tasks(config.data, spec, seed=config.run.seed).draw(), episode_plan(config).with_model(MODEL)
    records = await train(spec, task, settings)
    expected = seen(spec)
    assert [kind for kind, _ in expected] == ["ResetState", "StepState", "StepState"]
    for kind, values in expected:
        cls = {"ResetState": ResetState, "StepState": StepState}[kind]
        assert set(values) == {key for key, value in vars(cls).items() if isinstance(value, property)}

    await train(spec, task, episode_plan(config_of(spec, "process")).with_model(MODEL))
    assert seen(spec) == expected, "in a process of its own"

    await replay(spec, records, settings)
    assert seen(spec) == expected, "replay"

    asked = settings_of(spec.spec, max_turns=3, max_new_tokens=100, seed=3)
    played = await make_player(asked, spec, CODEC, Watch()).play(replace(task, position=-1), repeating(TEXTS))
    assert (played.error, played.finished) == (None, True)
    assert seen(spec) == expected, "check"

    play(spec, open_tasks(config.data, spec, seed=config.run.seed), monkeypatch)
    assert seen(spec) == expected, "play"


USES = {
    "turns_left": """
class Env(Sums):
    def step(self, state):
        right = state.action_text.strip() == state.label
        return StepResult(float(right), f"No. {state.turns_left} left.", terminated=right or state.turns_left == 0)
""",
    "sampling": """
class Env(Sums):
    def reset(self, state):
        return ResetResult(sampling={"max_tokens": 64})

    def step(self, state):
        assert state.sampling_params.max_tokens == 64
        assert len(state.action_text) <= 64 * 12, len(state.action_text)
        return super().step(state)
""",
    "async_init": """
from openrlhf.utils.agent import AgentInstanceBase

class Env(AgentInstanceBase):
    tasks = Sums.tasks

    async def __init__(self, *args, **kwargs):
        self.asked = 0

    async def step(self, states, **kwargs):
        self.asked += 1
        return {"rewards": float(states["action_text"].strip() == states["label"]), "done": self.asked == 1}
""",
    "rendered_prompt": """
from openrlhf.utils.agent import AgentInstanceBase

class Env(AgentInstanceBase):
    tasks = Sums.tasks

    async def reset(self, states, **kwargs):
        assert states["observation"].endswith("<|assistant|>"), states["observation"]
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        return {"rewards": float(states["action_text"].strip() == states["label"]), "done": True}
""",
}
HEAD = """
from agentrl import AgentInstance, ResetResult, StepResult, Task

class Sums(AgentInstance):
    @classmethod
    def tasks(cls):
        return [Task(f"What is {a}+{b}?", label=str(10 * a + b)) for a, b in ((1, 2), (2, 5), (3, 3), (4, 8), (5, 1), (6, 9))]

    def step(self, state):
        return StepResult(float(state.action_text.strip() == state.label), terminated=True)
"""


@pytest.mark.parametrize("use", USES)
def test_an_environment_that_uses_it_passes(use: str, tmp_path: Path) -> None:
    file = tmp_path / "env.py"
    file.write_text(HEAD + USES[use])
    report = checked(f"{file}:Env")
    assert ids(report) == set(), [finding.seen for finding in report.findings]
    assert report.skipped == []
