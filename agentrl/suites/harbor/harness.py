"""Task folders of Harbor in containers, with an agent program: ``--agent harbor:FOLDER#harness=NAME``."""

from __future__ import annotations

import asyncio
import os
from typing import ClassVar

from agentrl.core.types import Task
from agentrl.env.agent import StepResult
from agentrl.env.black_box import BlackBoxAgent, ModelEndpoint
from agentrl.env.isolation.system import ProcessLimits
from agentrl.env.sandbox.spec import current_choice
from agentrl.suites.command import check_end
from agentrl.suites.harbor.folders import FOLDER, ContainerTasks
from agentrl.suites.harbor.trial import Trial, judged
from agentrl.suites.harness import InstalledHarness


class HarborProgram(ContainerTasks, BlackBoxAgent):
    """One trial: a program of the table works in the task's container until it ends or its time is over; the task's tests judge.

    Attributes:
        installed: The program.
        process_limits: Those of the run, of which the names of variables that are passed hold.
    """

    installed: ClassVar[InstalledHarness]
    process_limits = ProcessLimits()

    async def run(self, task: Task, llm: ModelEndpoint) -> StepResult:
        """Run the program and the tests.

        Raises:
            EnvError: If the program fails, or the tests do not end or give no reward.
            SandboxError: If a container does not start, or its memory or disk is used up.
        """
        read = await asyncio.to_thread(self.read_task, str(task.metadata[FOLDER]))
        passed = {name: os.environ[name] for name in self.process_limits.passed if name in os.environ}
        network = self.network or current_choice().network == "all"
        async with Trial(read, network=network, installed=self.installed) as trial:
            ended = await trial.act(task, llm, passed)
            # A program that is ended by its time has an exit code that says nothing; what it has done is judged.
            if ended.ended != "timeout":
                check_end((self.installed.path,), ended, self.process_limits)
            rewards = await trial.verify()
        return judged(rewards, self.rewarded, task.id, truncated=ended.ended == "timeout")
