"""Which tasks are measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.api.evaluation import measured_tasks
from agentrl.config.mapping import from_mapping
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.env.agent_spec import AgentSpec
from agentrl.resolve.parts import evaluation_tasks
from agentrl.rollout.tasks import open_tasks
from agentrl.suites.load import load_agent

FINITE = "[Task(str(i)) for i in range(20)]"
ENDLESS = "(Task(str(i)) for i in itertools.count())"


def scene(folder: Path, tasks: str, **settings: object) -> tuple[TrainConfig, AgentSpec]:
    file = folder / f"env_{abs(hash((tasks, str(folder))))}.py"
    file.write_text(
        "import itertools\nfrom agentrl import AgentInstance, StepResult, Task\n\n\nclass Env(AgentInstance):\n    @classmethod\n"
        f"    def tasks(cls):\n        return {tasks}\n\n    def step(self, state):\n        return StepResult(0.0, terminated=True)\n"
    )
    return from_mapping(TrainConfig, {"agent": str(file), **settings}), load_agent(str(file))


def prompts(config: TrainConfig, agent: AgentSpec) -> list[object]:
    return [task.prompt for task in measured_tasks(config, agent)]


def test_all_tasks_without_a_size_and_also_with_one_that_is_too_large(tmp_path: Path) -> None:
    for size in (0, 20, 99):
        assert prompts(*scene(tmp_path, FINITE, eval_size=size)) == [str(i) for i in range(20)]


def test_a_size_takes_those_that_training_with_it_holds_out(tmp_path: Path) -> None:
    config, agent = scene(tmp_path, FINITE, eval_size=6, seed=3)
    chosen = prompts(config, agent)
    assert chosen == [task.prompt for task in open_tasks(config.data, agent, seed=config.run.seed).held_out]
    assert len(set(chosen)) == 6


def test_tasks_without_end_need_a_size(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no end of tasks"):
        prompts(*scene(tmp_path, ENDLESS))
    assert prompts(*scene(tmp_path, ENDLESS, eval_size=3)) == ["0", "1", "2"]


KINDS = "[Task(str(i), metadata={'kind': 'odd' if i % 2 else 'even', 'level': 1}) for i in range(20)]"


def test_a_run_is_evaluated_on_held_out_tasks_or_not_at_all(tmp_path: Path) -> None:
    assert evaluation_tasks(*scene(tmp_path, FINITE)) == []
    assert len(evaluation_tasks(*scene(tmp_path, FINITE, eval_every=2, eval_size=6))) == 6
    with pytest.raises(ConfigError, match="--eval-size"):
        evaluation_tasks(*scene(tmp_path, FINITE, eval_at_start=True))


@pytest.mark.parametrize(("name", "by", "says"), [("eval/score/hard", "", "even, odd"), ("eval/score/1", "level", "one kind")])
def test_the_best_of_a_kind_needs_tasks_of_that_kind(tmp_path: Path, name: str, by: str, says: str) -> None:
    evaluated = {"eval_every": 2, "eval_size": 19, "eval_by": by}
    assert evaluation_tasks(*scene(tmp_path, KINDS, keep_best="eval/score", **evaluated))
    assert evaluation_tasks(*scene(tmp_path, KINDS, keep_best="eval/score/odd", eval_every=2, eval_size=19))
    with pytest.raises(ConfigError, match=says):
        evaluation_tasks(*scene(tmp_path, KINDS, keep_best=name, **evaluated))
