"""A calculator: the model writes a tool call, reads the result, and gives the answer.

It teaches an episode of two turns. The environment keeps state between them (was the call the right one?), answers the
first turn with a message of the role ``tool``, and pays for both: 0.2 for the right call, 0.8 for the right answer.
The score, which counts episodes rather than turns, is 1 only if both were right. Run it with::

    agentrl train --agent envs/calculator.py --async

    system     Call {"tool":"add|sub|mul","args":[a,b]}, then answer.
    user       7*8=?
    assistant  {"tool":"mul","args":[7,8]}
    tool       56
    assistant  56
"""

import json
import operator
import re
from collections.abc import Iterable
from typing import Any

from agentrl import AgentInstance, Message, StepResult, StepState, Task

SYSTEM = Message(role="system", content='Call {"tool":"add|sub|mul","args":[a,b]}, then answer.')
TOOLS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
SIGNS = {"add": "+", "sub": "-", "mul": "*"}


class Calculator(AgentInstance):
    """One question about two digits, answered with the help of a tool."""

    called_right = False

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """All 300 questions. The label is the call that the model should make."""
        return [
            Task([SYSTEM, Message(role="user", content=f"{a}{SIGNS[tool]}{b}=?")], label=(tool, [a, b]), id=f"{tool}-{a}-{b}")
            for tool in TOOLS
            for a in range(10)
            for b in range(10)
        ]

    def solve(self, state: StepState) -> str:
        """Return a right turn, for `agentrl check`: first the call, then its result."""
        tool, args = state.label
        return json.dumps({"tool": tool, "args": args}) if state.turn == 0 else str(TOOLS[tool](*args))

    def step(self, state: StepState) -> StepResult:
        """Run the tool after the first turn, judge the answer after the second."""
        return self._run_tool(state) if state.turn == 0 else self._judge(state)

    def _run_tool(self, state: StepState) -> StepResult:
        call = parse_call(state.action_text)
        if call is None:
            return StepResult(0.0, terminated=True, score=0.0, info={"malformed": 1.0})
        tool, args = call
        self.called_right = call == state.label
        result = Message(role="tool", content=str(TOOLS[tool](*args)))
        return StepResult(0.2 if self.called_right else 0.0, observation=[result], info={"malformed": 0.0})

    def _judge(self, state: StepState) -> StepResult:
        tool, args = state.label
        numbers = re.findall(r"-?\d+", state.action_text)
        right = bool(numbers) and numbers[-1] == str(TOOLS[tool](*args))
        return StepResult(0.8 if right else 0.0, terminated=True, score=float(right and self.called_right))


def parse_call(text: str) -> tuple[str, list[int]] | None:
    """The tool and its arguments, or `None` if `text` is not a call with a known tool and two numbers below 1000."""
    try:
        call: Any = json.loads(text)
        tool, args = call["tool"], call["args"]
        valid = tool in TOOLS and len(args) == 2 and all(type(value) is int and abs(value) < 1000 for value in args)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return (tool, list(args)) if valid else None
