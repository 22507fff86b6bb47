"""Groups of black-box agents through the rollout worker, loaded from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.assets import tiny_model_path
from agentrl.config.sections import changed
from agentrl.core.types import GroupRequest, Task
from agentrl.learner.batch import collate
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.worker import EpisodeWorker
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.endpoint.support import ASKS

pytestmark = pytest.mark.anyio


async def test_groups_of_a_file_are_collated_and_kept_apart(tmp_path: Path) -> None:
    file = tmp_path / "asks.py"
    file.write_text(ASKS)
    agent = load_agent(str(file))
    assert agent.name == "Asks"
    engine = ScriptedEngine(answer=lambda request: [20 + sum(request.request_id.encode()) % 30, 21, 22], max_model_len=512)
    worker = EpisodeWorker(engine, agent, changed(EpisodePlan(), model=str(tiny_model_path()), max_new_tokens=8))
    await worker.start()
    try:
        tasks = [Task("1+2=?", label="3", id=str(number)) for number in range(2)]
        group_requests = [GroupRequest(group_id=number, task=task, n_samples_per_prompt=4, version=0) for number, task in enumerate(tasks)]
        groups = [(await worker.run_group(group_request))[1] for group_request in group_requests]
    finally:
        await worker.close()
    assert [trajectory.error for group in groups for trajectory in group.trajectories] == [None] * 8
    batch = collate(groups)
    assert (batch.num_episodes, batch.num_rows, batch.num_actions) == (
        8,
        16,
        8 * 9,
    )  # the third answer is a branch, whose prompt is that of the first
    for group in groups:
        for trajectory in group.trajectories:
            mine = [request for request in engine.requests if request.session == trajectory.trajectory_id]
            assert len(mine) == 3
            first, second, third = (request.prompt_ids.tolist() for request in mine)
            assert second[: len(first) + 3] == [*first, *trajectory.turns[0].token_ids.tolist()]
            assert third == first
