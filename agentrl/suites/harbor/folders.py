"""Tasks, images and solutions of task folders of Harbor, for the environments that play them in containers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar

from agentrl.core.types import Task
from agentrl.suites.harbor.containers import ContainerTask, read_container_task
from agentrl.suites.harbor.trial import Trial, chosen_reward, image_workdir

FOLDER = "folder"


class ContainerTasks:
    """Task folders, each of them one task.

    Attributes:
        folders: Folders of the tasks.
        network: True: tasks that ask for the network have it.
        rewarded: Name of the reward, for tests that write several.
        spec: What ``--agent`` said, for messages.
    """

    folders: ClassVar[tuple[str, ...]] = ()
    network: ClassVar[bool] = False
    rewarded: ClassVar[str] = ""
    spec: ClassVar[str] = ""

    @classmethod
    def prepare(cls) -> None:
        """Build the images of all tasks, those that are not there."""
        boxes = {box.image: box for folder in cls.folders for box in cls.read_task(folder).boxes}

        async def build() -> None:
            for box in boxes.values():
                await image_workdir(box)

        _elsewhere(lambda: asyncio.run(build()))

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """One task per folder; the prompt is its instruction."""
        read = map(cls.read_task, cls.folders)
        return [Task(task.instruction, id=task.folder.name, metadata={FOLDER: str(task.folder)}) for task in read]

    @classmethod
    async def try_solution(cls, task: Task, *, solved: bool) -> float:
        """Return the reward of the task's own solution, or of an agent that does nothing."""
        async with Trial(cls.read_task(str(task.metadata[FOLDER])), network=cls.network) as trial:
            if solved:
                await trial.solve()
            rewards = await trial.verify()
        return rewards[chosen_reward(rewards, cls.rewarded, task.id)]

    @classmethod
    def read_task(cls, folder: str) -> ContainerTask:
        """Read a task folder; raises as `read_container_task`."""
        return read_container_task(cls.spec, Path(folder))


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
