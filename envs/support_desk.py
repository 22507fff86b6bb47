"""Support desk: an assistant finds out what a simulated customer wants; a model plays the customer, and a judge reads the conversation.

It teaches a simulated user. The customer is an agent of its own with instructions that the assistant does not see; with a partner
another model plays it, and only the assistant is trained. The assistant asks, and ends the conversation with a report of three facts. A
rule pays the share of the facts that are right. With `JUDGE_URL` and `JUDGE_MODEL` a judge also reads the whole conversation and
rates how the customer was treated. Its mark counts a quarter and is no part of the score, so that courtesy alone solves nothing. A judge
that fails makes a failed episode, not a reward of 0. Run it with::

    agentrl train --agent envs/support_desk.py --model Qwen/Qwen3-0.6B --partner "customer=endpoint:http://127.0.0.1:8000/v1#model=user"

    assistant                                  customer
    user       A customer is waiting. Ask ...
    assistant  What is wrong with what?
                                               user       You are a customer. Your lamp ...
                                                          What is wrong with what?
                                               assistant  My lamp is cracked.
    user       My lamp is cracked.
    assistant  REPORT 4711 lamp cracked
"""

import os
import re
from collections.abc import Iterable
from random import Random
from typing import Any

from agentrl import AgentInstance, ResetResult, ResetState, StepResult, StepState, Task, judge

ITEMS = ["lamp", "chair", "kettle", "radio", "clock", "jacket", "bicycle", "camera", "printer", "tent"]
DAMAGES = ["cracked", "late", "wrong", "loud", "torn", "missing", "wet", "broken", "old", "dirty"]
NUM_TASKS = 200
MAX_QUESTIONS = 4
JUDGE_SHARE = 0.25
NO_REPORT = -0.1
DESK = "A customer is waiting. Ask for the number of the order, the item and the problem, one question at a time."
FORM = "When you know all three, write only: REPORT number item problem"
RATE = "Rate from 0 to 10 how polite and brief the assistant is to the customer. Reply with the number alone.\n\n{completion}"


def make_judge() -> Any:
    """The judge that the environment's variables name; without them there is none."""
    url = os.environ.get("JUDGE_URL", "")
    return judge(RATE, model=os.environ.get("JUDGE_MODEL", "judge"), base_url=url) if url else None


class SupportDesk(AgentInstance):
    """The assistant asks, the customer answers, until the report or the last question."""

    agents = ("assistant", "customer")
    trained_agents = ("assistant",)
    judge = make_judge()  # one for all episodes: it keeps its connections and verdicts

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """Customers with an order, an item and a problem; the label is the right report."""
        rng = Random(0)
        facts = [(str(rng.randrange(1000, 10000)), rng.choice(ITEMS), rng.choice(DAMAGES)) for _ in range(NUM_TASKS)]
        return [Task(f"{DESK} {FORM}", label=f"REPORT {' '.join(fact)}", id=str(number)) for number, fact in enumerate(facts)]

    async def reset(self, state: ResetState) -> ResetResult:
        """Give the customer its part; the assistant begins with the task's prompt."""
        self.facts, self.said = state.label.split()[1:], list[str]()
        if self.judge is not None:
            self.judge.open()
        number, item, damage = self.facts
        part = f"You are a customer. Your order {number}, a {item}, is {damage}. Answer what you are asked in a few words, and no more."
        return ResetResult(observations={"assistant": state.task.prompt, "customer": part})

    async def step(self, state: StepState) -> StepResult:
        """Hand the text to the other; a report ends the conversation."""
        text = state.action_text.strip()
        self.said.append(f"{state.agent}: {text}")
        if state.agent == "customer":
            return StepResult(0.0, text or "(says nothing)")
        report = re.search(r"REPORT\b(.*)", text)
        if report is None and len(self.said) < 2 * MAX_QUESTIONS - 1:
            return StepResult(0.0, text or "(says nothing)")
        if report is None:
            return StepResult(NO_REPORT, terminated=True, score=0.0, info={"reported": 0.0})
        words = report[1].lower().split()
        right = sum(said == fact for said, fact in zip(words, self.facts, strict=False)) / len(self.facts) if len(words) == 3 else 0.0
        return await self.judged(right, state)

    async def judged(self, right: float, state: StepState) -> StepResult:
        """The share of right facts, and the judge's mark if there is a judge."""
        if self.judge is None:
            return StepResult(right, terminated=True, score=right, info={"reported": 1.0})
        verdict = await self.judge.judge(StepState({**state, "action_text": "\n".join(self.said)}))
        reward = (1 - JUDGE_SHARE) * right + JUDGE_SHARE * verdict.reward
        return StepResult(reward, terminated=True, score=right, info={"reported": 1.0, **verdict.info})

    async def close(self) -> None:
        """Give up the judge's connections with the last episode."""
        if self.judge is not None and hasattr(self, "said"):
            await self.judge.close()

    def solve(self, state: StepState) -> str:
        """A right report at once, for `agentrl check`."""
        return str(state.label)
