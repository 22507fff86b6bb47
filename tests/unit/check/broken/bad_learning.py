"""Defects of rewards and ends."""

import re

from sound import Sums, Tries

from agentrl import ResetResult, StepResult, Task


class RewardsNothing(Sums):
    def step(self, state):
        return StepResult(0.0, terminated=True)


class RewardsEverything(Tries):
    def step(self, state):
        return StepResult(1.0, terminated=True)


class LooksForLabelInText(Sums):
    def step(self, state):
        return StepResult(float(state.label in state.action_text), terminated=True)


class ManyLabels(Sums):
    @classmethod
    def tasks(cls):
        return [Task(f"What is {number}+1000?", label=str(number + 1000)) for number in range(60)]


class LooksForOneLabelOfMany(ManyLabels):
    """No constant answer names enough of the labels."""

    def step(self, state):
        return StepResult(float(state.label in state.action_text), terminated=True)


class TakesAnyNumber(ManyLabels):
    def step(self, state):
        return StepResult(float(state.label in re.findall(r"\d+", state.action_text)), terminated=True)


class TakesTheLastNumber(ManyLabels):
    """Sound: an answer that names several has one that counts."""

    def step(self, state):
        return StepResult(float(re.findall(r"\d+", state.action_text)[-1:] == [state.label]), terminated=True)


class WrongSign(ManyLabels):
    def step(self, state):
        return StepResult(-float(state.action_text.strip() == state.label), terminated=True)


class JudgeIgnoresLabel(ManyLabels):
    def step(self, state):
        return StepResult(0.9 if "score: 9" in state.action_text or len(state.action_text) > 5000 else 0.3, terminated=True)


class PaysEveryLook(ManyLabels):
    """Looking is paid again and again, and more in the end than the answer."""

    price = 0.2

    def solve(self, state):
        return state.label if state.turn else "LOOK"

    def step(self, state):
        if state.action_text == "LOOK":
            return StepResult(self.price, "You see a number.")
        return StepResult(float(state.action_text == state.label), terminated=True)


class PaysLookALittle(PaysEveryLook):
    """Sound: the answer is worth more than all looks."""

    price = 0.02


class PaysLookWithoutSolve(PaysEveryLook):
    solve = None

    def reset(self, state):
        return ResetResult(f"{state.task.prompt} Write LOOK to see it.")


class NearlyAlwaysYes(Sums):
    @classmethod
    def tasks(cls):
        return [Task(f"Is {n} above 1?", label="yes" if n > 1 else "no") for n in range(12)]


class RewardsSilence(Sums):
    def step(self, state):
        return StepResult(1.0 / (1 + len(state.action_text)), terminated=True)


class AnswerInPrompt(Sums):
    def reset(self, state):
        return ResetResult(f"{state.task.prompt} (answer: {state.label})")

    def step(self, state):
        return StepResult(float(f"answer: {state.label}" in state.action_text or state.action_text == state.label), terminated=True)


class NeverEnds(Tries):
    def step(self, state):
        return StepResult(float(state.action_text.strip() == state.label), "Again?")


class HasALimit(Tries):
    """Sound: a limit of its own is an end."""

    def step(self, state):
        return StepResult(float(state.action_text.strip() == state.label), "Again?", truncated=state.turn == 1)


class RewardsFive(Sums):
    """Only worth a note."""

    def step(self, state):
        return StepResult(5.0 * (state.action_text.strip() == state.label), terminated=True)


class NoLabels(Sums):
    """Only worth a note: nobody knows the right answer."""

    @classmethod
    def tasks(cls):
        return [Task(f"Which number do I think of? ({n})", metadata={"secret": 1000 + 37 * n}) for n in range(6)]

    def step(self, state):
        return StepResult(float(state.action_text.strip() == str(state.task.metadata["secret"])), terminated=True)
