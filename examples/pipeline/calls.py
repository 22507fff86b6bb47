"""One question, one tool call: the task of docs/pipeline.md, small enough to train every step of a pipeline on a laptop.

system     Call {"tool":"add|sub|mul","args":[a,b]}, then answer.
user       7*8=?
assistant  {"tool":"mul","args":[7,8]}
"""

import json
from collections.abc import Iterable
from typing import Any

from agentrl import AgentInstance, Message, StepResult, StepState, Task

SYSTEM = Message(role="system", content='Call {"tool":"add|sub|mul","args":[a,b]}, then answer.')
SIGNS = {"add": "+", "sub": "-", "mul": "*"}


class Calls(AgentInstance):
    """The reward is 1 for the right call, 0.5 for another call that can be carried out, and 0 for everything else."""

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """240 of the 300 questions."""
        return [task for index, task in enumerate(questions()) if index % 5]

    @classmethod
    def eval_tasks(cls) -> Iterable[Task]:
        """The other 60, on which nothing is trained."""
        return [task for index, task in enumerate(questions()) if not index % 5]

    def solve(self, state: StepState) -> str:
        """Return the right call, for `agentrl check`."""
        return json.dumps(state.label)

    def step(self, state: StepState) -> StepResult:
        """Compare the call with the right one."""
        call = parse_call(state.action_text)
        right = call is not None and call == state.label
        return StepResult(1.0 if right else 0.5 if call else 0.0, terminated=True, score=float(right))


def parse_call(text: str) -> dict[str, Any] | None:
    """Return the call that a text is; `None` if it is none."""
    try:
        call: Any = json.loads(text)
        valid = call.keys() == {"tool", "args"} and call["tool"] in SIGNS and len(call["args"]) == 2
        return call if valid and all(type(value) is int for value in call["args"]) else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def questions() -> list[Task]:
    """Return all questions about two digits, with the call that answers each."""
    return [
        Task([SYSTEM, Message(role="user", content=f"{a}{SIGNS[tool]}{b}=?")], label={"tool": tool, "args": [a, b]}, id=f"{tool}-{a}-{b}")
        for a in range(10)
        for b in range(10)
        for tool in SIGNS
    ]
