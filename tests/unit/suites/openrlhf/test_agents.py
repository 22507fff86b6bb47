"""Files written for OpenRLHF load and play where it is not installed."""

import importlib.util
import pickle
import sys
from pathlib import Path

import pytest

from agentrl.core.errors import EnvLoadError
from agentrl.core.types import GroupRequest, Status, Task, Trajectory
from agentrl.suites import load
from agentrl.suites.load import load_agent
from agentrl.suites.openrlhf.agents import extract_boxed_answer, grade_answer
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import CODEC, Scene, says
from tests.unit.rollout.test_episode import dialogue

pytestmark = pytest.mark.anyio

FILES = Path(__file__).parents[3] / "openrlhf_files"
BASES = "from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor\n"
AGENT = "class AgentInstance(AgentInstanceBase):\n    async def step(self, states): return {'rewards': 1.0, 'done': True}\n"


async def play(spec: Path | str, *texts: str) -> Trajectory:
    group_request = GroupRequest(group_id=3, task=Task("What is 1+2?", label="3", id="sum"), n_samples_per_prompt=1, version=0)
    scene = Scene(load_agent(str(spec)).load(), ScriptedEngine(answer=says(*texts)), group_request=group_request)
    trajectory = await scene.play()
    assert (trajectory.error, trajectory.status) == (None, Status.FINISHED)
    return trajectory


async def test_single_turn() -> None:
    assert (await play(FILES / "single_turn.py", "It is 3.")).reward == 1.0
    assert (await play(FILES / "single_turn.py", "It is 4.")).reward == 0.0


async def test_several_turns_with_feedback() -> None:
    trajectory = await play(FILES / "feedback.py", "1", "2", "3")
    assert [turn.reward for turn in trajectory.turns] == pytest.approx([0, 0, 1 / 3])
    assert (trajectory.score, trajectory.metrics) == (1.0, {"right": pytest.approx(1 / 3)})
    assert CODEC.decode(trajectory.turns[1].prompt_ids) == "<|user|>Wrong. Again.<|end|><|assistant|>"


async def test_changed_sampling_settings() -> None:
    trajectory = await play(FILES / "sampling.py", "I think it is three", "It is 3 I think")
    assert [turn.temperature for turn in trajectory.turns] == [1.0, 0.5]
    assert len(trajectory.turns[1].token_ids) == 4
    assert trajectory.metrics == {"temperature": 0.75}


async def test_extra_logs_of_several_kinds() -> None:
    trajectory = await play(FILES / "extra_logs.py", "three", "3")
    assert trajectory.metrics == {"length": 3.0, "even": 0.0, "turn": 1.5}
    assert trajectory.reward == pytest.approx(1 / 6 + 1 / 2)
    assert trajectory.score == 1.0


def test_the_executor_decides_and_may_be_named(tmp_path: Path) -> None:
    spec = load_agent(str(FILES / "feedback.py"))
    assert (spec.name, spec.spec) == ("Tries", f"{FILES}/feedback.py:AgentExecutor")
    load._load_named.cache_clear()
    assert pickle.loads(pickle.dumps(spec)).load().__name__ == "Tries"
    assert load_agent(f"{FILES}/feedback.py:AgentExecutor").name == "Tries"
    assert load_agent(f"{FILES}/feedback.py:OtherAgent").name == "OtherAgent"


@pytest.mark.skipif(importlib.util.find_spec("openrlhf") is not None, reason="OpenRLHF is installed")
def test_the_stand_in_is_there_only_while_a_file_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(BASES + AGENT)
    load_agent(str(path))
    assert not [name for name in sys.modules if name.partition(".")[0] == "openrlhf"]
    with pytest.raises(ImportError):
        __import__("openrlhf")


def test_an_installed_package_is_used_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "openrlhf" / "utils"
    package.mkdir(parents=True)
    (package / "agent.py").write_text(
        "class AgentExecutorBase: pass\nclass AgentInstanceBase: pass\nclass SingleTurnAgentExecutor: pass\n"
        "class MultiTurnAgentExecutor(AgentExecutorBase):\n"
        "    def __init__(self, cls): self.agent_instance_cls = cls\n"
        "    async def execute(self): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    path = tmp_path / "agent.py"
    reset = "    async def reset(self, states): return states\n"
    path.write_text(
        BASES + AGENT + reset + "class AgentExecutor(MultiTurnAgentExecutor):\n    def __init__(self): super().__init__(AgentInstance)\n"
    )
    try:
        cls = load_agent(str(path)).load()
        assert cls.__mro__[1].__module__ == "openrlhf.utils.agent"
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "openrlhf"]:
            del sys.modules[name]


@pytest.mark.parametrize("reward", ["'judge.py'", "['judge.py']"])
async def test_a_single_turn_executor_with_a_reward_file(tmp_path: Path, reward: str) -> None:
    (tmp_path / "judge.py").write_text("def reward_func(queries, prompts, labels): return {'rewards': [0.25]}\n")
    path = tmp_path / "agent.py"
    path.write_text(BASES + f"class AgentExecutor(SingleTurnAgentExecutor):\n    def __init__(self): super().__init__({reward})\n")
    assert (await play(path, "3")).reward == 0.25


async def test_a_single_turn_executor_with_a_function(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(
        BASES + "def judge(queries, prompts, labels): return {'rewards': [float(queries[0].endswith(labels[0]))]}\n"
        "class AgentExecutor(SingleTurnAgentExecutor):\n"
        "    def __init__(self):\n        super().__init__()\n        self.reward_func = judge\n"
    )
    assert (await play(path, "so 3")).reward == 1.0


def test_a_single_turn_executor_with_a_server(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(
        BASES + "class AgentExecutor(SingleTurnAgentExecutor):\n    def __init__(self): super().__init__('http://127.0.0.1:1')\n"
    )
    assert load_agent(str(path)).name == "RewardServer"


@pytest.mark.parametrize(
    ("text", "problem", "remedy"),
    [
        ("class AgentExecutor(AgentExecutorBase):\n    def execute(self, *a): ...\n", "AgentExecutor.execute is a plain def", "async def"),
        (
            "class AgentExecutor(AgentExecutorBase):\n    def __init__(self, x): ...\n    async def execute(self, *a): ...\n",
            "AgentExecutor() raised TypeError",
            "needs no arguments",
        ),
        ("class AgentExecutor(MultiTurnAgentExecutor): ...\n", "AgentExecutor() raised TypeError", "super().__init__(AgentInstance)"),
        ("class AgentExecutor(SingleTurnAgentExecutor): ...\n", "names neither", "super().__init__(AgentInstance)"),
        ("from openrlhf.utils import get_tokenizer\n", "cannot import name 'get_tokenizer'", ""),
        ("import openrlhf.trainer\n", "No module named 'openrlhf.trainer'", "Install the package"),
    ],
)
def test_what_cannot_be_used_says_what_to_do(tmp_path: Path, text: str, problem: str, remedy: str) -> None:
    path = tmp_path / "agent.py"
    path.write_text(BASES + AGENT + text)
    with pytest.raises(EnvLoadError) as caught:
        load_agent(str(path))
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("change", ["", " + 'Think.'"])
async def test_reset_is_given_the_rendered_prompt(tmp_path: Path, change: str) -> None:
    """As in OpenRLHF, where the data set renders it; what is handed back is what the model sees."""
    path = tmp_path / "agent.py"
    path.write_text(
        BASES + "class Agent(AgentInstanceBase):\n"
        f"    async def reset(self, states, **kwargs): return {{'observation': states['observation']{change}}}\n"
        "    async def step(self, states, **kwargs):\n"
        "        return {'rewards': float(len(states['observation_text'])), 'done': True}\n"
    )
    trajectory = await play(path, "3")
    rendered = dialogue(("user", "What is 1+2?")) + ("Think." if change else "")
    assert trajectory.turns[0].prompt_text == rendered
    assert trajectory.reward == len(rendered)


async def test_other_classes_are_given_the_tasks_own_prompt(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(
        "class Agent:\n    async def reset(self, states): self.seen = states['observation']\n"
        "    async def step(self, states): return {'rewards': float(self.seen == 'What is 1+2?'), 'done': True}\n"
    )
    assert (await play(path, "3")).reward == 1.0


async def test_an_init_that_is_a_coroutine(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(
        BASES + "class AgentInstance(AgentInstanceBase):\n    async def __init__(self, *args, **kwargs): self.reward = 0.5\n"
        "    async def step(self, states): return {'rewards': self.reward, 'scores': -3.5, 'done': True}\n"
    )
    trajectory = await play(path, "3")
    assert (trajectory.reward, trajectory.score) == (0.5, 0.0)


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        ("so \\boxed{3}", "3"),
        ("\\boxed{1}, no, \\boxed{ \\frac{1}{2} }.", "\\frac{1}{2}"),
        ("\\boxed{1}, no, \\boxed{2", None),
        ("3", None),
        (None, None),
    ],
)
def test_boxed_answers(text: str | None, boxed: str | None) -> None:
    assert extract_boxed_answer(text) == boxed


def test_graded_answers() -> None:
    pairs = [("3", "3"), ("0.5", "\\frac{1}{2}"), ("2x+1", "1+2x"), ("blue", "blue"), ("3", "4"), (None, "3"), ("3", None)]
    assert [grade_answer(given, truth) for given, truth in pairs] == [True, True, True, True, False, False, False]


async def test_a_reward_file_that_uses_openrlhfs_graders(tmp_path: Path) -> None:
    path = tmp_path / "math_reward.py"
    path.write_text(
        "from openrlhf.utils import extract_boxed_answer, grade_answer\n"
        "def reward_func(queries, prompts, labels, **kwargs):\n"
        "    right = [float(grade_answer(extract_boxed_answer(q[len(p):]), l)) for q, p, l in zip(queries, prompts, labels)]\n"
        "    return {'rewards': right, 'scores': [4 * value - 2 for value in right]}\n"
    )
    found = [await play(path, text) for text in ("\\boxed{3.0}", "\\boxed{4}")]
    assert [(trajectory.reward, trajectory.score) for trajectory in found] == [(1.0, 1.0), (0.0, 0.0)]
