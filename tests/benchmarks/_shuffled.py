"""`envs/shapes.py` with the pictures of other questions, on which nothing can be learned but which words answer which question.

agentrl train --agent tests/benchmarks/_shuffled.py:Shuffled --model tiny-vision
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from agentrl import Task
from agentrl.suites.load import load_agent

Shapes = load_agent(str(Path(__file__).parents[2] / "envs" / "shapes.py")).load()


def shuffled(tasks: list[Task]) -> list[Task]:
    """Return tasks of which each has the picture of the one before it."""
    return [dataclasses.replace(task, images=before.images) for task, before in zip(tasks, [tasks[-1], *tasks[:-1]], strict=True)]


class Shuffled(Shapes):
    """The same questions and judgement beside other pictures."""

    @classmethod
    def tasks(cls) -> list[Task]:
        """Questions to train on."""
        return shuffled(list(Shapes.tasks()))

    @classmethod
    def eval_tasks(cls) -> list[Task]:
        """Other questions."""
        return shuffled(list(Shapes.eval_tasks()))
