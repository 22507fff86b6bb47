"""``envs/service_desk.py``: its cases, its tools, its customers, and attempts at reward without service."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest

from agentrl import ResetState, StepResult, StepState, Task
from agentrl.suites.load import load_agent
from tests.unit.envs.play import ENVS, load

pytestmark = pytest.mark.anyio

ServiceDesk = load("service_desk")
SPACE = ServiceDesk.judge.__globals__
TASKS = list(itertools.islice(ServiceDesk.tasks(), 300))
QUESTION = "What are the number and the code of the order?"


def case_of(task: Task) -> Any:
    return SPACE["make_case"](task.seed)


def call(tool: str, *arguments: Any) -> str:
    return json.dumps({"tool": tool, "args": arguments})


def some(**wanted: Any) -> Task:
    """The first task whose case has these attributes."""
    return next(task for task in TASKS if all(getattr(case_of(task), name) == value for name, value in wanted.items()))


async def serve(task: Task, *texts: str, cls: Any = ServiceDesk, agents: tuple[str, ...] = ("",)) -> list[StepResult]:
    """The results of turns, one agent's after another's; without texts those that `solve` writes."""
    env, results = cls(), list[StepResult]()
    env.reset(ResetState(task=task, observation=task.prompt, label=task.label, seed=0))
    agent = agents[0]
    for turn in range(len(texts) or 12):
        state = StepState(task=task, label=task.label, action_text=texts[turn] if texts else "", turn=turn, agent=agent)
        state["action_text"] = state.action_text or env.solve(state)
        results.append(await env.step(state))
        if results[-1].terminated:
            break
        agent = results[-1].agent or agent
    await env.close()
    return results


def test_every_wish_and_rule_comes_and_those_of_the_evaluation_have_other_seeds():
    counts = Counter((case_of(task).wish, case_of(task).rule) for task in TASKS)
    assert {wish for wish, _ in counts} == {"cancel", "refund", "move", "ask"}
    assert set(counts) >= {("cancel", 1), ("cancel", 2), ("move", 2), ("refund", 3), ("ask", 1), ("refund", 0)}
    assert 0.3 < sum(count for (_, rule), count in counts.items() if rule) / len(TASKS) < 0.5
    evaluated = list(ServiceDesk.eval_tasks())
    assert not {task.seed for task in evaluated} & set(range(10**6))
    assert case_of(TASKS[0]) == case_of(TASKS[0])
    assert len({repr(case_of(task)) for task in [*TASKS, *evaluated]}) == len(TASKS) + len(evaluated)


async def test_the_service_that_the_rules_want_earns_1_in_every_task():
    for task in TASKS:
        assert (await serve(task))[-1].reward == 1.0, task.id


async def test_a_refund_is_judged_by_the_database_and_by_the_amount_told():
    task = some(wish="refund", rule=0, opened=True, insists=0)
    number, amount = case_of(task).order.number, case_of(task).amount
    look, pay = (QUESTION, call("order", number)), call("refund", number, amount)
    assert amount == case_of(task).order.price - 5
    last = (await serve(task, *look, pay, f"We refund {amount} for order {number}."))[-1]
    assert (last.reward, last.score, last.info["messages"]) == (1.0, 1.0, 2.0)
    silent = (await serve(task, *look, pay, "It is done."))[-1]
    assert (silent.reward, silent.info["database"], silent.info["told"]) == (0.0, 1.0, 0.0)
    for wrong in (call("refund", number, amount + 5), call("cancel", number), pay + call("move", number, "Paris")):
        last = (await serve(task, *look, wrong, f"We refund {amount}."))[-1]
        assert (last.reward, last.info["database"], last.info["told"]) == (0.0, 0.0, 1.0)


async def test_the_tools_obey_where_a_rule_forbids_it_and_that_is_not_paid():
    task = some(wish="cancel", rule=2, insists=1)
    number = case_of(task).order.number
    first, again, last = await serve(task, QUESTION, "Rule 2 forbids it.", "By rule 2 I cannot.")
    assert str(number) in str(first.observation)
    assert again.observation in SPACE["INSISTS"]
    assert last.reward == 1.0
    weak = await serve(task, QUESTION, "Rule 2 forbids it.", call("cancel", number), "It is cancelled.")
    assert weak[2].observation[0]["content"] == "done"
    assert (weak[-1].reward, weak[-1].info["database"]) == (0.0, 0.0)


@pytest.mark.parametrize("text", ["rule 1, rule 2, rule 3", "1 2 3", "rule 12", "By rule 3.", "No."])
async def test_a_refusal_names_the_one_rule(text: str):
    assert (await serve(some(rule=2, insists=0), text))[-1].reward == 0.0


async def test_the_customer_says_what_is_asked_and_leaves_after_the_last_message():
    task = some(wish="ask", rule=0)
    case = case_of(task)
    one, other, neither = (await serve(task, "Which number?", "The code?", "Who?"))[:3]
    assert (one.observation, other.observation) == (f"The order is {case.order.number}.", f"The code is {case.code}.")
    assert neither.observation == case.opening
    served = some(wish="ask", rule=0, insists=1)
    assert (await serve(served, f"In {case_of(served).news} days."))[-1].terminated
    results = await serve(task, *["Who?"] * 10)
    assert (len(results), results[-1].reward, results[-1].terminated) == (6, 0.0, True)


async def test_calls_that_do_not_fit_change_nothing():
    task = some(wish="ask", rule=0)
    calls = call("order", 1) + call("move", 5, "Rome") + call("refund", case_of(task).order.number, "much") + call("delete", 5)
    (result,) = await serve(task, calls)
    texts = [message["content"] for message in result.observation]
    assert texts[:2] == ["There is no order 1.", "There is no order 5."]
    assert [text[:6] for text in texts[2:]] == ["Error:", "Error:"]


async def test_a_model_plays_the_customer_if_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("CUSTOMER", "model")
    copy = tmp_path / "played_desk.py"
    copy.write_text((ENVS / "service_desk.py").read_text())
    cls = load_agent(str(copy)).load()
    assert (cls.agents, cls.trained_agents, ServiceDesk.agents) == (("desk", "customer"), ("desk",), ())
    task = some(wish="cancel", rule=0)
    number = case_of(task).order.number
    asked, said, done, told, end = await serve(
        task, QUESTION, f"{number}", call("cancel", number), "It is cancelled.", "GOODBYE", cls=cls, agents=cls.agents
    )
    assert [result.agent for result in (asked, said, done, told)] == ["customer", "desk", "desk", "customer"]
    assert (said.observation, told.observation) == (str(number), "It is cancelled.")
    assert (end.reward, end.rewards, end.scores) == (0.0, {"desk": 1.0}, {"desk": 1.0})
    assert (await serve(task, cls=cls, agents=cls.agents))[-1].rewards == {"desk": 1.0}
    opening = cls().reset(ResetState(task=task, observation=task.prompt, label=task.label, seed=0))
    assert str(number) in opening.observations["customer"]
    assert str(number) not in str(opening.observations["desk"])
