"""Defects of `tasks`."""

import copy
import random
import threading

from sound import Sums, Tries

from agentrl import ResetResult, Task


class NoTasks(Sums):
    @classmethod
    def tasks(cls):
        return []


class TasksRaise(Sums):
    @classmethod
    def tasks(cls):
        raise FileNotFoundError("questions.json")


class TasksArePairs(Sums):
    @classmethod
    def tasks(cls):
        return [("What is 1+2?", "3"), ("What is 2+2?", "4")]


class IdsTwice(Sums):
    @classmethod
    def tasks(cls):
        return [Task("What is 1+2?", label="3", id="a"), Task("What is 2+2?", label="4", id="a")]


class SingleUseIterator(Sums):
    questions = iter(Sums.tasks())

    @classmethod
    def tasks(cls):
        return cls.questions


class TasksUnseeded(Sums):
    @classmethod
    def tasks(cls):
        return random.sample([Task(f"What is {n}+1?", label=str(n + 1)) for n in range(500)], 12)


class SameTaskTwice(Sums):
    @classmethod
    def tasks(cls):
        return [*Sums.tasks(), *Sums.tasks()[:2]]


class LabelHoldsLock(Sums):
    @classmethod
    def tasks(cls):
        return [Task(task.prompt, label=task.label, metadata={"lock": threading.Lock()}) for task in Sums.tasks()]


class MutatesMetadata(Tries):
    @classmethod
    def tasks(cls):
        return [Task(task.prompt, label=task.label, metadata={"tries": []}) for task in Sums.tasks()]

    def step(self, state):
        state.task.metadata["tries"].append(state.action_text)
        return super().step(state)


class CopiesMetadata(MutatesMetadata):
    """Right: it works on a copy."""

    def reset(self, state):
        self.tried = copy.deepcopy(state.task.metadata["tries"])

    def step(self, state):
        self.tried.append(state.action_text)
        return Tries.step(self, state)


class MessagesWithoutRole(Sums):
    @classmethod
    def tasks(cls):
        return [Task([{"content": task.prompt}], label=task.label) for task in Sums.tasks()]


class PromptTooLong(Sums):
    @classmethod
    def tasks(cls):
        return [Task(f"{task.prompt} {'word ' * 2000}", label=task.label) for task in Sums.tasks()]


class PromptNearLimit(Sums):
    def reset(self, state):
        return ResetResult(f"{state.task.prompt} {'7 ' * 480}")
