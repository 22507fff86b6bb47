"""Defects of snapshots, by which an episode is forked."""

import copy
import random

import gymnasium
from sound import Tries

from agentrl import GymEnv, ResetResult, StepResult


class Copies(Tries):
    """Right: what is said depends on random numbers and on every answer so far, and both are copied."""

    def reset(self, state):
        self.random, self.answers = random.Random(state.seed), []
        return ResetResult()

    def step(self, state):
        self.answers.append(state.action_text)
        result = super().step(state)
        hint = f"Not {self.random.randint(1000, 9999999)}, after {len(self.answers)} answers. Again?"
        return StepResult(result.reward, hint, terminated=result.terminated)

    def snapshot(self):
        return copy.deepcopy(vars(self))

    def restore(self, snapshot):
        vars(self).update(snapshot)


class ForgetsRandomNumbers(Copies):
    def snapshot(self):
        return list(self.answers)

    def restore(self, snapshot):
        self.random, self.answers = random.Random(0), snapshot


class ForgetsAnswers(Copies):
    """Which a copy of the first turn does not show."""

    def restore(self, snapshot):
        self.random, self.answers = snapshot["random"], []


class SharesHistory(Copies):
    def snapshot(self):
        return {"random": copy.copy(self.random), "answers": self.answers}


class SaysItCannot(Copies):
    """Right: what cannot be copied says so."""

    def snapshot(self):
        raise RuntimeError("a connection is open")


class RestoreRaises(Copies):
    def restore(self, snapshot):
        self.answers = snapshot["history"]


class Handle:
    """State of a library outside of Python, of which a copy is the same."""

    moves = 0

    def __deepcopy__(self, memo):
        return self


class Echo(gymnasium.Env):
    """Pays for the action that the last bit of its observation names; the rest counts the moves."""

    observation_space = gymnasium.spaces.Discrete(10)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.handle, self.bits = Handle(), self.np_random.integers(2, size=5)
        return int(self.bits[0]), {}

    def step(self, action):
        right = action == self.bits[self.handle.moves]
        self.handle.moves += 1
        return 2 * self.handle.moves + int(self.bits[self.handle.moves]), right / 4, self.handle.moves == 4, False, {}


class StateOutsideOfPython(GymEnv):
    actions = {"left": 0, "right": 1}  # noqa: RUF012
    num_tasks = 6

    def make(self):
        return Echo()
