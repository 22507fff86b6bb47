import json
import sys
from typing import Any

import pytest

from agentrl import ResetState, StepResult, StepState
from tests.unit.envs.play import load

pytestmark = pytest.mark.anyio

Search = load("search")
module: Any = sys.modules[Search.__module__]
TASKS = {task.id: task for task in (*Search.tasks(), *Search.eval_tasks())}


async def say(env: Any, task: Any, text: str) -> StepResult:
    return await env.step(StepState(task=task, label=task.label, action_text=text))


async def call(env: Any, task: Any, name: str, **arguments: str) -> str:
    result = await say(env, task, f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>")
    assert (result.reward, result.terminated) == (0.0, False)
    return str(result.observation[0]["content"])


async def test_two_documents_lead_to_the_answer() -> None:
    task, env = TASKS["Tarn Point-0"], Search()
    (message,) = env.reset(ResetState(task=task, observation=task.prompt, label=task.label, seed=0)).observation
    assert [tool["function"]["name"] for tool in message["tools"]] == ["search", "read"]
    assert json.loads(await call(env, task, "search", query="the lighthouse of Tarn Point"))[0] == "Tarn Point"
    assert "by Edda Brook" in await call(env, task, "read", title="Tarn Point")
    assert "born in Marlow Ferry" in await call(env, task, "read", title="edda brook")
    result = await say(env, task, "She was born in Marlow Ferry.")
    assert (result.reward, result.terminated, result.score, result.info) == (1.0, True, 1.0, {"lookups": 3.0})


@pytest.mark.parametrize(("lookups", "reward"), [(0, 1.0), (4, 1.0), (6, 0.9), (40, 0.0)])
async def test_needless_lookups_cost_a_little(lookups: int, reward: float) -> None:
    task, env = TASKS["Tarn Point-1"], Search()
    for _ in range(lookups):
        assert "no document" in await call(env, task, "read", title="nonsense")
    result = await say(env, task, "1838")
    assert (result.reward, result.score) == (pytest.approx(reward), 1.0)


@pytest.mark.parametrize("answer", ["", "Eastholt", "Marlow Ferry or Eastholt", "Marlow", " ".join(module.ANSWERS)])
async def test_other_answers_earn_nothing(answer: str) -> None:
    result = await say(Search(), TASKS["Tarn Point-0"], answer)
    assert (result.reward, result.terminated, result.score) == (0.0, True, 0.0)


def test_every_question_is_found_by_its_own_words_and_answered_by_two_documents() -> None:
    for task in TASKS.values():
        place = task.id.rpartition("-")[0]
        assert place in module.search(task.prompt)
        builder = module.LIGHTHOUSES[place][1]
        assert builder in module.read(place)
        assert task.label in module.read(builder)
    assert module.search("zzz") == []


def test_answers_are_different_and_evaluation_asks_for_others() -> None:
    assert len(set(module.ANSWERS)) == len(module.ANSWERS)
    train, held = ([task.label for task in tasks()] for tasks in (Search.tasks, Search.eval_tasks))
    assert (len(train), len(held)) == (27, 9)
    assert set(train).isdisjoint(held)
