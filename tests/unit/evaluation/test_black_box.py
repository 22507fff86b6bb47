"""Black-box agents are evaluated as every other environment, through the same worker."""

from pathlib import Path

import pytest

from agentrl.assets import tiny_model_path
from agentrl.config.sections import changed
from agentrl.core.types import Task
from agentrl.evaluation.assessment import assess
from agentrl.evaluation.evaluations import EvalPlan, evaluate
from agentrl.evaluation.plan import EvalConfig
from agentrl.flow.pool import RolloutPool
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.worker import EpisodeWorker
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio

FILE = '''
from agentrl import BlackBoxAgent

class Asks(BlackBoxAgent):
    """Asks once, and fails at one task."""

    async def run(self, task, llm):
        async with llm.openai() as client:
            messages = [{"role": "user", "content": task.prompt}]
            await client.chat.completions.create(model=llm.model, messages=messages)
        if task.id == "2":
            raise OSError("no disk")
        return float(task.label)
'''


async def test_rewards_and_failures_of_an_evaluation(tmp_path: Path) -> None:
    file = tmp_path / "asks.py"
    file.write_text(FILE)
    engine = ScriptedEngine(answer=lambda request: [20, 21, 22], max_model_len=512)
    worker = EpisodeWorker(engine, load_agent(str(file)), changed(EpisodePlan(), model=str(tiny_model_path()), max_new_tokens=8))
    tasks = [Task("1+2=?", label=str(number), id=str(number), position=number) for number in range(3)]
    settings = EvalPlan(eval=EvalConfig(eval_samples=2, eval_temperature=0.0), num_recorded=1)
    await worker.start()
    try:
        outcomes = await evaluate(RolloutPool({"engine-0": worker}), tasks, settings, version=0)
    finally:
        await worker.close()
    assessment = assess(outcomes)
    assert [[episode.reward for episode in outcome.episodes] for outcome in outcomes] == [[0.0, 0.0], [1.0, 1.0], []]
    assert assessment.failed_tasks == ("2",)
    assert "Asks.run raised OSError: no disk" in next(iter(assessment.causes))
    assert {request.sampling.temperature for request in engine.requests} == {0.0}
