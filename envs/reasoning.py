"""Reasoning: questions without end, which a package makes from seeds.

It teaches how to wrap somebody else's tasks by hand, here those of reasoning-gym (``pip install 'agentrl[reasoning-gym]'``).
`tasks` is a generator, so nothing is made before it is needed; question number 1000 is the same in every run, which is what
lets an interrupted run go on where it was. An answer is compared with the package's own to the letter. The package brings
scorers as well, but for most data sets they also pay for an answer that holds the right one among other things: "17" earns half
where "7" is right, and a model under training finds that out. Run it with::

    agentrl train --agent envs/reasoning.py --async --max-new-tokens 8

    user       How many 1 bits are there in the binary representation of the number 43?
    assistant  4

The same without a file: ``--agent 'reasoning-gym:count_bits?max_n=63&ask='``.
"""

import itertools
from collections.abc import Iterable

import reasoning_gym

from agentrl import AgentInstance, StepResult, StepState, Task

DATASET = "count_bits"
OPTIONS = {"min_n": 1, "max_n": 63}


class Reasoning(AgentInstance):
    """One question, one answer."""

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """No end of them. The package seeds each item with its own seed plus the item's number."""
        dataset = reasoning_gym.create_dataset(DATASET, seed=0, **OPTIONS)
        for number in itertools.count():
            item = dataset[number]
            yield Task(item["question"], label=item["answer"], id=f"{DATASET}-{number}")

    def step(self, state: StepState) -> StepResult:
        """White space around the answer does not matter; anything else does."""
        right = state.action_text.strip() == state.label
        return StepResult(float(right), terminated=True)
