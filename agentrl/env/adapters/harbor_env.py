"""Task folders of Harbor in containers, with turns of our own and a tool ``bash``: ``--agent harbor:FOLDER``."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from agentrl.core.types import Task
from agentrl.env.adapters.harbor_containers import ContainerTask, read_container_task
from agentrl.env.adapters.harbor_trial import Trial, chosen_reward, image_workdir
from agentrl.env.agent import ResetResult, ResetState, StepResult, StepReturn, StepState
from agentrl.env.tools.environment import ToolEnv

FOLDER = "folder"
COMMAND_S = 30.0


class HarborEnv(ToolEnv):
    """One trial: the model runs commands in the task's container, and its first turn without one ends it; the task's tests judge.

    Attributes:
        folders: Folders of the tasks.
        network: True: tasks that ask for the network have it.
        rewarded: Name of the reward, for tests that write several.
        command_s: Time limit of one command.
        spec: What ``--agent`` said, for messages.
    """

    folders: ClassVar[tuple[str, ...]] = ()
    network: ClassVar[bool] = False
    rewarded: ClassVar[str] = ""
    command_s: ClassVar[float] = COMMAND_S
    spec: ClassVar[str] = ""
    max_output_chars = 10_000
    tool_timeout_s = math.inf  # the container ends a command in time, and says so

    _trial: Trial | None = None
    _deadline = math.inf

    @classmethod
    def prepare(cls) -> None:
        """Build the images of all tasks, those that are not there."""
        boxes = {box.image: box for folder in cls.folders for box in cls._task(folder).boxes}

        async def build() -> None:
            for box in boxes.values():
                await image_workdir(box)

        _elsewhere(lambda: asyncio.run(build()))

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """One task per folder; the prompt is its instruction."""
        read = map(cls._task, cls.folders)
        return [Task(task.instruction, id=task.folder.name, metadata={FOLDER: str(task.folder)}) for task in read]

    @classmethod
    async def try_solution(cls, task: Task, *, solved: bool) -> float:
        """Return the reward of the task's own solution, or of an agent that does nothing."""
        trial = Trial(cls._task(str(task.metadata[FOLDER])), network=cls.network)
        try:
            await trial.open()
            if solved:
                await trial.solve()
            rewards = await trial.verify()
        finally:
            await trial.close()
        return rewards[chosen_reward(rewards, cls.rewarded, task.id)]

    @classmethod
    def _task(cls, folder: str) -> ContainerTask:
        return read_container_task(cls.spec, Path(folder))

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
        task = await asyncio.to_thread(self._task, str(state.task.metadata[FOLDER]))
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
        judged = await self.judge(state)
        return replace(judged, terminated=False, truncated=True, info={**result.info, **judged.info})

    async def judge(self, state: StepState) -> StepResult:
        """Run the task's tests."""
        assert self._trial is not None
        rewards = await self._trial.verify()
        name = chosen_reward(rewards, self.rewarded, state.task.id)
        return StepResult(rewards[name], terminated=True, info={other: value for other, value in rewards.items() if other != name})

    async def close(self) -> None:
        """Remove the containers."""
        if self._trial is not None:
            await self._trial.close()
        await super().close()


def _elsewhere(call: Callable[[], None]) -> None:
    """Make a call on a thread of its own, since an event loop may run on this one."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="agentrl-env")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
