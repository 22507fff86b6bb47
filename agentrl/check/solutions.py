"""Tasks that bring their own solution: it earns 1, and doing nothing earns 0."""

from __future__ import annotations

from agentrl.check.context import Context
from agentrl.check.findings import NO_TIME
from agentrl.core.errors import EnvError

SHARE = 0.7
"""Share of the time that solutions may take."""
EXACT = 1e-6


async def check_solutions(context: Context) -> None:
    """Try the solution of each task, and an agent that does nothing, if the environment can: a class method ``try_solution``."""
    attempt = getattr(context.cls, "try_solution", None)
    if attempt is None:
        return
    for number, task in enumerate(context.tasks):
        if number and context.left(SHARE) <= 0:
            context.report.skipped.append(f"the solutions of {len(context.tasks) - number} tasks: {NO_TIME}")
            return
        for solved, rule, wanted in ((True, "solution-fails", 1.0), (False, "nothing-earns", 0.0)):
            try:
                reward = await attempt(task, solved=solved)
                seen = f"the reward is {reward:g}" if abs(reward - wanted) > EXACT else ""
            except EnvError as error:
                seen = str(error)
            if seen:
                context.found(rule, "try_solution", f"task {task.id}: {seen}")
