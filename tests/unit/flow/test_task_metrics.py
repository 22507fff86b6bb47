"""Metrics say how often the tasks were gone through, and how each of several data sets does."""

from agentrl.core.summaries import GroupSummary
from agentrl.core.types import GroupRequest, Task
from agentrl.flow.metrics import _tasks
from agentrl.flow.queue import Accepted
from tests.unit.flow.fakes import member


def group(number: int, task: Task, *rewards: float) -> Accepted:
    group_request = GroupRequest(group_id=number, task=task, n_samples_per_prompt=len(rewards), version=0)
    summary = GroupSummary(group_id=number, members=tuple(map(member, rewards)), seconds=1.0, versions=(0, 0))
    return Accepted(group_request, "ref", summary, 0.0)


def test_reward_and_share_of_each_data_set() -> None:
    easy, hard = (Task("p", id=f"{name}/0", metadata={"source": name}, epoch=epoch) for name, epoch in (("easy", 2), ("hard", 1)))
    groups = [group(0, easy, 1.0, 0.0), group(1, easy, 1.0), group(2, hard, 0.0), group(3, easy, 1.0)]
    assert _tasks(groups) == {
        "tasks/epoch": 2.0,
        "source/easy/reward": 0.75,
        "source/easy/share": 0.75,
        "source/hard/reward": 0.0,
        "source/hard/share": 0.25,
    }


def test_a_column_of_that_name_is_not_a_data_set() -> None:
    assert _tasks([group(0, Task("p", id="0", metadata={"source": "https://somewhere/1"}), 1.0)]) == {"tasks/epoch": 0.0}
