"""Guess my number: a game of several turns, won by halving the interval that is left.

It teaches a dialogue with the environment. The secret number is the task's label and never reaches the prompt; `step`
answers each guess with a hint. Four guesses are just enough for 1 to 15 if each one halves what is left. Winning pays 1,
losing or not naming a number pays nothing. It is tempting to pay more for a fast win, but a fast win is mostly luck:
the members of a group share the number, and an estimator that compares them would teach the lucky guess. Run it with::

    agentrl train --agent envs/guess_number.py --async

    user       Guess my number from 1 to 15. I say higher or lower.
    assistant  8
    user       lower
    assistant  4
    user       higher
    assistant  6
"""

import re
from collections.abc import Iterable

from agentrl import AgentInstance, StepResult, StepState, Task

HIGHEST = 15
MAX_GUESSES = 4


class GuessNumber(AgentInstance):
    """Find a secret number within four guesses."""

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """One task for every secret number; all of them read the same."""
        prompt = f"Guess my number from 1 to {HIGHEST}. I say higher or lower."
        return [Task(prompt, label=number, id=f"number-{number}") for number in range(1, HIGHEST + 1)]

    def step(self, state: StepState) -> StepResult:
        """End the game at a hit, after the last guess, or if there is no number in the text; else give a hint."""
        numbers = re.findall(r"\d+", state.action_text)
        guess = int(numbers[-1][:9]) if numbers else None
        if guess == state.label:
            return StepResult(1.0, terminated=True, score=1.0, info={"guesses": state.turn + 1.0})
        if guess is None or state.turn + 1 == MAX_GUESSES:
            return StepResult(0.0, terminated=True, score=0.0)
        return StepResult(0.0, observation="higher" if guess < state.label else "lower")
