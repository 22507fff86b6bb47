"""The class attributes `agents` and `trained_agents`."""

import pickle
from pathlib import Path

import pytest

from agentrl.core.errors import EnvLoadError
from agentrl.env.multi_agent import MultiAgentSpec, multi_agent_spec
from agentrl.suites.load import load_agent

CLASS = "from agentrl import AgentInstance, StepResult\nclass Duel(AgentInstance):\n    {}\n    def step(self, state): ...\n"


def loaded(folder: Path, line: str) -> MultiAgentSpec:
    path = folder / "duel.py"
    path.write_text(CLASS.format(line))
    spec = load_agent(str(path))
    return multi_agent_spec(spec.load(), spec.source)


def test_all_agents_are_trained_unless_some_are_named(tmp_path: Path) -> None:
    agents_spec = loaded(tmp_path, "agents = ['ann', 'bob']")
    assert (agents_spec.agents, agents_spec.trained, agents_spec.env) == (("ann", "bob"), {"ann", "bob"}, "duel.py: Duel")
    assert pickle.loads(pickle.dumps(agents_spec)) == agents_spec
    assert [agents_spec.after(agent) for agent in agents_spec.agents] == ["bob", "ann"]


def test_an_agent_may_be_frozen(tmp_path: Path) -> None:
    assert loaded(tmp_path, "agents, trained_agents = ('ann', 'bob'), ('bob',)").trained == {"bob"}


def test_without_names_there_is_one_agent(tmp_path: Path) -> None:
    assert loaded(tmp_path, "pass").agents == ("",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("agents = 'ann'", "Duel.agents = 'ann' is no list of distinct names"),
        ("agents = ('ann', 'ann')", "is no list of distinct names"),
        ("agents = (1, 2)", "is no list of distinct names"),
        ("agents = ('ann', 'no spaces')", "Duel.agents has 'no spaces', which cannot be an agent's name"),
        ("agents = ('mean',)", "'mean', which cannot be an agent's name"),
        ("agents, trained_agents = ('ann',), ('bob',)", "trained_agents has 'bob', which is none of its agents. Its agents are ann"),
        ("trained_agents = ('bob',)", "Its agents are not named: set the class attribute agents"),
    ],
)
def test_bad_names_fail_when_the_class_is_loaded(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(EnvLoadError) as caught:
        loaded(tmp_path, line)
    assert message in str(caught.value)
