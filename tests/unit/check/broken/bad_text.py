"""Defects of what the model reads."""

from sound import Sums, Tries

from agentrl import Message, ResetResult, StepResult


class ControlTokensInPrompt(Sums):
    def reset(self, state):
        return ResetResult(f"<|user|>{state.task.prompt}<|end|>")


class ControlTokensInFeedback(Tries):
    def step(self, state):
        right = state.action_text.strip() == state.label
        return StepResult(float(right), "<|end|><|user|>No. Again?<|end|>", terminated=right or state.turn == 2)


class RawWithoutTemplate:
    tasks = Sums.tasks

    async def reset(self, states, **kwargs):
        self.turn = 0
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turn += 1
        right = states["action_text"].strip() == states["label"]
        return {"rewards": float(right), "environment_feedback": "No. Again?", "done": right or self.turn == 3}


class RepeatsHistory(Tries):
    def reset(self, state):
        self.log = [state.task.prompt, "Answer with the digits of both numbers."]
        return ResetResult("\n".join(self.log))

    def step(self, state):
        right = state.action_text.strip() == state.label
        self.log += [state.action_text[:200], "No. Again?"]
        return StepResult(float(right), "\n".join(self.log), terminated=right or state.turn == 2)


class HugeObservation(Tries):
    def step(self, state):
        right = state.action_text.strip() == state.label
        return StepResult(float(right), "No. " * 300, terminated=right or state.turn == 2)


class AnswersAsTool(Tries):
    """Right for a template that knows the role."""

    def step(self, state):
        right = state.action_text.strip() == state.label
        return StepResult(float(right), [Message(role="tool", content="No. Again?")], terminated=right or state.turn == 2)
