"""The calculator of ``envs/calculator.py`` with its tools as functions, which take a moment."""

import asyncio
import re
from collections.abc import Iterable

from agentrl import StepState, Task, ToolEnv
from envs.calculator import TOOLS, Calculator

WAIT_S = 0.02


async def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: First number.
        b: Second number.
    """
    await asyncio.sleep(WAIT_S)
    return a + b


async def sub(a: int, b: int) -> int:
    """Subtract.

    Args:
        a: First number.
        b: Number to subtract.
    """
    await asyncio.sleep(WAIT_S)
    return a - b


async def mul(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: First number.
        b: Second number.
    """
    await asyncio.sleep(WAIT_S)
    return a * b


class Tools(ToolEnv):
    """Calls of the bundled model, which its prompt describes; an answer after them is judged."""

    tools = (add, sub, mul)
    tool_prompt = ""

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        return Calculator.tasks()

    def judge(self, state: StepState) -> float:
        tool, args = state.label
        return float(str(TOOLS[tool](*args)) in re.findall(r"-?\d+", state.action_text))
