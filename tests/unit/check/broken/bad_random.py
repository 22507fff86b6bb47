"""Defects of seeds and of state."""

import random
import time
from typing import ClassVar

import numpy as np
from sound import Sums, Tries

from agentrl import ResetResult, StepResult

ANSWERED = []


class GlobalRandomInReset(Sums):
    def reset(self, state):
        return ResetResult(f"{state.task.prompt} Hint: not {random.randint(1000, 9999999)}.")


class UnseededGenerator(Sums):
    def reset(self, state):
        return ResetResult(f"{state.task.prompt} Hint: not {np.random.default_rng().integers(1000, 9999999)}.")


class GlobalRandomInStep(Sums):
    def step(self, state):
        return StepResult(float(state.action_text == state.label) + random.random() / 100, terminated=True, score=0.0)


class ClockInReward(Sums):
    def step(self, state):
        return StepResult(float(state.action_text == state.label) - (time.perf_counter_ns() % 1_000_000) / 1e9, terminated=True)


class ReseedsGlobal(Sums):
    def reset(self, state):
        random.seed(state.seed)
        return ResetResult(f"{state.task.prompt} Hint: not {random.randint(1000, 9999999)}.")


class ReseedsNumpy(Sums):
    def reset(self, state):
        np.random.seed(state.seed % 2**32)


class SeededGenerator(Sums):
    """Right: a generator of the episode's own."""

    def reset(self, state):
        self.rng = random.Random(state.seed)
        return ResetResult(f"{state.task.prompt} Hint: not {self.rng.randint(1000, 9999999)}.")


class HistoryInClass(Tries):
    history: ClassVar[list] = []

    def step(self, state):
        self.history.append(state.action_text)
        result = super().step(state)
        return StepResult(result.reward, f"Try {len(self.history)} was wrong.", terminated=result.terminated)


class AnswerInClass(Tries):
    def reset(self, state):
        type(self).answer = state.label

    def step(self, state):
        right = state.action_text.strip() == self.answer
        return StepResult(float(right), "No. Again?", terminated=right or state.turn == 2)


class HistoryInModule(Tries):
    def step(self, state):
        ANSWERED.append(state.action_text)
        result = super().step(state)
        return StepResult(result.reward, f"Try {len(ANSWERED)} was wrong.", terminated=result.terminated)


class Board:
    """Not plain data, so that its change cannot be seen."""

    label = None


class AnswerInSharedObject(Tries):
    board = Board()

    def reset(self, state):
        self.board.label = state.label

    def step(self, state):
        right = state.action_text.strip() == self.board.label
        return StepResult(float(right), "No. Again?", terminated=right or state.turn == 2)


class CacheInClass(Sums):
    """Right, but worth a note."""

    cache: ClassVar[dict] = {}

    def step(self, state):
        self.cache[state.action_text] = len(self.cache)
        return super().step(state)
