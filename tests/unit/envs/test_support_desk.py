from typing import Any

import pytest

from agentrl import ResetState, StepResult, StepState, judge
from tests.servers import Request, serve
from tests.unit.envs.play import load

pytestmark = pytest.mark.anyio

SupportDesk = load("support_desk")
TASK = next(iter(SupportDesk.tasks()))
NUMBER, ITEM, DAMAGE = TASK.label.split()[1:]


async def talk(*texts: str, judge: Any = None) -> list[StepResult]:
    env, results = type("Desk", (SupportDesk,), {"judge": judge})(), []
    opening = await env.reset(ResetState(task=TASK, observation=TASK.prompt, label=TASK.label, seed=0))
    assert NUMBER in opening.observations["customer"]
    assert NUMBER not in opening.observations["assistant"]
    for turn, text in enumerate(texts):
        assert not results or not results[-1].terminated
        agent = SupportDesk.agents[turn % 2]
        results.append(await env.step(StepState(task=TASK, label=TASK.label, action_text=text, turn=turn, agent=agent)))
    await env.close()
    return results


async def test_each_reads_what_the_other_says():
    first, second, last = await talk("What is wrong?", f"My {ITEM} is {DAMAGE}.", f"REPORT {NUMBER} {ITEM} {DAMAGE}")
    assert (first.observation, second.observation) == ("What is wrong?", f"My {ITEM} is {DAMAGE}.")
    assert (first.terminated, last.terminated, last.reward, last.score) == (False, True, 1.0, 1.0)


@pytest.mark.parametrize(
    ("report", "score"),
    [(f"REPORT {NUMBER} {ITEM} fine", 2 / 3), ("REPORT", 0.0), (f"REPORT {NUMBER} {ITEM} {DAMAGE} {DAMAGE}", 0.0), ("REPORT a b c", 0.0)],
)
async def test_the_share_of_right_facts_is_paid(report: str, score: float):
    assert (await talk(report))[-1].score == pytest.approx(score)


async def test_questions_without_end_cost_something():
    last = (await talk(*["Why?", "So."] * 3, "Why?"))[-1]
    assert (last.terminated, last.reward, last.score) == (True, -0.1, 0.0)


async def test_the_judge_reads_the_conversation_and_does_not_decide_the_score():
    async def handler(request: Request) -> None:
        await request.answer({"choices": [{"message": {"role": "assistant", "content": "8"}}]})

    async with serve(handler) as server:
        reward = judge("{completion}", model="judge", base_url=f"{server.url}/v1")
        last = (await talk("Hello?", "Hello.", "REPORT a b c", judge=reward))[-1]
        asked = server.requests[0].json["messages"][0]["content"]
    assert asked == "assistant: Hello?\ncustomer: Hello.\nassistant: REPORT a b c"
    assert (last.reward, last.score, last.info["judge/value"]) == (pytest.approx(0.25 * 0.8), 0.0, 8.0)
