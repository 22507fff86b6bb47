"""Reasoning: questions that a package makes from seeds.

It teaches how to wrap somebody else's tasks by hand, here those of reasoning-gym (``pip install 'agentrl[reasoning-gym]'``).
Its data sets are read by number, and the same number gives the same question in every run. This one has few questions and
repeats them, so each is kept once; for one that does not run out, make `tasks` a generator, which is read as far as needed. An
answer is compared with the package's own to the letter. The package brings scorers as well, but for most data sets they also
pay for an answer that holds the right one among other things: "17" earns half where "7" is right, and a model under training
finds that out. Run it with::

    agentrl train --agent envs/reasoning.py --async --max-new-tokens 8

    user       How many 1 bits are there in the binary representation of the number 43?
    assistant  4

The same without a file: ``--agent 'reasoning-gym:count_bits?max_n=63&ask='``.
"""

from collections.abc import Iterable

import reasoning_gym

from agentrl import AgentInstance, StepResult, StepState, Task

DATASET = "count_bits"
OPTIONS = {"min_n": 1, "max_n": 63}
NUM_ITEMS = 1000


class Reasoning(AgentInstance):
    """One question, one answer."""

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """Every question once; the label is the package's answer."""
        dataset = reasoning_gym.create_dataset(DATASET, seed=0, size=NUM_ITEMS, **OPTIONS)
        answers = {item["question"]: item["answer"] for item in dataset}
        return [Task(question, label=answer, id=f"{DATASET}-{number}") for number, (question, answer) in enumerate(answers.items())]

    def step(self, state: StepState) -> StepResult:
        """White space around the answer does not matter; anything else does."""
        right = state.action_text.strip() == state.label
        return StepResult(float(right), terminated=True)
