"""Task folders of Harbor in containers, with turns of our own and a tool ``bash``: ``--agent harbor:FOLDER``."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from agentrl.env.agent import ResetResult, ResetState, StepResult, StepReturn, StepState
from agentrl.env.tools.environment import ToolEnv
from agentrl.suites.harbor.folders import FOLDER, ContainerTasks
from agentrl.suites.harbor.trial import Trial, judged

COMMAND_S = 30.0


class HarborEnv(ContainerTasks, ToolEnv):
    """One trial: the model runs commands in the task's container, and its first turn without one ends it; the task's tests judge.

    Attributes:
        command_s: Time limit of one command.
    """

    command_s: ClassVar[float] = COMMAND_S
    max_output_chars = 10_000
    tool_timeout_s = math.inf  # the container ends a command in time, and says so

    _trial: Trial | None = None
    _deadline = math.inf

    def list_tools(self) -> Sequence[Callable[..., Any]]:
        """Return the one tool."""
        return (self.bash,)

    async def bash(self, command: str) -> str:
        """Run a command in the container, in the working folder of the task, and return what it prints.

        Args:
            command: The command, for bash. Files stay from one command to the next; variables and processes do not.
        """
        assert self._trial is not None
        done = await self._trial.run(command, min(self.command_s, max(0.1, self._deadline - time.monotonic())))
        if done.ended == "timeout":
            return f"{done.output}\n[stopped after {self.command_s:g} s]"
        return f"{done.output}\n[exit code {done.code}]" if done.code else done.output

    async def reset(self, state: ResetState) -> ResetResult:
        """Start the container, and offer the tool."""
        task = await asyncio.to_thread(self.read_task, str(state.task.metadata[FOLDER]))
        self._trial = Trial(task, network=self.network)
        await self._trial.open()
        if task.agent_timeout_s is not None:
            self._deadline = time.monotonic() + task.agent_timeout_s
        result = super().reset(state)
        return await result if inspect.isawaitable(result) else result

    async def step(self, state: StepState) -> StepReturn:
        """Run the commands of this turn; judge after the last, or when the time of the agent is over."""
        result = await super().step(state)
        if not isinstance(result, StepResult) or result.terminated or (state.turns_left and time.monotonic() < self._deadline):
            return result
        verdict = await self.judge(state)
        return replace(verdict, terminated=False, truncated=True, info={**result.info, **verdict.info})

    async def judge(self, state: StepState) -> StepResult:
        """Run the task's tests."""
        assert self._trial is not None
        return replace(judged(await self._trial.verify(), self.rewarded, state.task.id), terminated=True)

    async def close(self) -> None:
        """Remove the containers."""
        if self._trial is not None:
            await self._trial.close()
        await super().close()
