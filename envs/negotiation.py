"""Negotiation: two agents split a pile of coins; both are the model that is trained.

It teaches environments of several agents. `agents` names them in the order in which they take turns. Each has a
conversation of its own: `reset` tells each its role in `observations`, and what `step` returns as the observation goes to the
agent that acts next. A deal pays both at once, by `rewards`. Each agent is compared with the same agent in the other
episodes of the group, so that what the first to speak can get is no measure for the second. Run it with::

    agentrl train --agent envs/negotiation.py --async

    ann                                        bob
    user       You are Ann. Split 9 coins.
    assistant  6
                                               user       You are Bob. Split 9 coins.
                                                          They take 6. What is 9-6?
                                               assistant  5
    user       They take 5. What is 9-5?
    assistant  4
"""

import re
from collections.abc import Iterable

from agentrl import AgentInstance, ResetResult, ResetState, StepResult, StepState, Task

MAX_DEMANDS = 4
NO_DEMAND = -0.2


class Negotiation(AgentInstance):
    """In turn, each agent says how many coins it takes; once the last two demands fit the pile, both get theirs."""

    agents = ("ann", "bob")

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """Piles of 5 to 9 coins."""
        return [Task(f"Split {coins} coins.", label=coins, id=f"{coins}-coins") for coins in range(5, 10)]

    def reset(self, state: ResetState) -> ResetResult:
        """Tell each agent who it is; Ann, being named first, begins."""
        self.demands: list[int] = []
        return ResetResult(observations={name: f"You are {name.title()}. {state.task.prompt}" for name in self.agents})

    def step(self, state: StepState) -> StepResult:
        """Split the pile if the demands fit; else tell the other agent."""
        coins = state.label
        numbers = re.findall(r"\d+", state.action_text)
        demand = int(numbers[-1][:9]) if numbers else None
        if demand is None or demand > coins:
            return StepResult(NO_DEMAND, terminated=True, info={"gain": 0.0})
        self.demands = [*self.demands[-1:], demand]
        if len(self.demands) == 2 and sum(self.demands) <= coins:
            other, own = (number / coins for number in self.demands)
            rival = "bob" if state.agent == "ann" else "ann"
            return StepResult(own, terminated=True, rewards={rival: other}, info={"gain": own + other})
        if state.turn + 1 == MAX_DEMANDS:
            return StepResult(0.0, terminated=True, info={"gain": 0.0})
        return StepResult(0.0, f"They take {demand}. What is {coins}-{demand}?")
