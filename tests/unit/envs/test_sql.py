import json
from typing import Any

import pytest

from agentrl import ResetState, StepState
from tests.unit.envs.play import load

pytestmark = pytest.mark.anyio

Sql = load("sql")
TASKS = list(Sql.tasks())


def begin(task: Any = TASKS[0]) -> Any:
    env = Sql()
    env.reset(ResetState(task=task, observation=task.prompt, label=task.label, seed=0))
    return env


async def ask(env: Any, sql: str) -> str:
    call = json.dumps({"name": "query", "arguments": {"sql": sql}})
    result = await env.step(StepState(task=TASKS[0], label=TASKS[0].label, action_text=f"<tool_call>{call}</tool_call>"))
    assert not result.terminated
    return result.observation[0]["content"]


async def test_a_query_leads_to_the_answer() -> None:
    task = next(task for task in TASKS if task.prompt.endswith("s were sold in all?"))
    item = task.prompt.split()[6].removesuffix("s")
    env = begin(task)
    assert await ask(env, f"SELECT SUM(amount) FROM sales WHERE item = '{item}'") == f"[[{task.label}]]"
    result = await env.step(StepState(task=task, label=task.label, action_text=f"They sold {task.label}."))
    assert (result.reward, result.terminated) == (1.0, True)
    env.close()


@pytest.mark.parametrize(
    ("label", "answer", "reward"),
    [
        ("17", "17", 1),
        ("17", "117", 0),
        ("17", "17 or 18", 0),
        ("17", "", 0),
        ("Lima", "Lima.", 1),
        ("Lima", "Lima, Oslo, Rome or Kyiv", 0),
    ],
)
async def test_answers(label: str, answer: str, reward: float) -> None:
    assert (await Sql().step(StepState(label=label, action_text=answer))).reward == reward


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        ("SELEC 1", "syntax error"),
        ("SELECT * FROM shops", "no such table"),
        ("DELETE FROM sales", "not authorized"),
        ("DROP TABLE sales", "not authorized"),
        ("ATTACH DATABASE 'other.db' AS x", "not authorized"),
        ("PRAGMA table_info(sales)", "not authorized"),
        ("SELECT 1; SELECT 2", "one statement at a time"),
        ("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n", "interrupted"),
        ("SELECT randomblob(1000000000)", "too big"),
    ],
)
async def test_what_a_query_may_not_do_is_told(sql: str, problem: str) -> None:
    env = begin()
    before = await ask(env, "SELECT COUNT(*) FROM sales")
    assert problem in await ask(env, sql)
    assert await ask(env, "SELECT COUNT(*) FROM sales") == before == "[[60]]"
    env.close()


async def test_only_the_first_rows_are_returned() -> None:
    assert len(json.loads(await ask(begin(), "SELECT * FROM sales"))) == 20


def test_tasks_have_answers_and_differ() -> None:
    assert len({task.id for task in TASKS}) == 400
    assert all(task.label not in ("", "None") for task in TASKS)
    assert len({(task.prompt, task.label) for task in TASKS}) > 200
