"""One question, one call: the task of docs/pipeline.md, small enough to train every step of a pipeline on a laptop.

user       7*8=?
assistant  mul(7,8)
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from agentrl import AgentInstance, StepResult, StepState, Task

FOLDER = Path(__file__).parent
CALL = re.compile(r"(add|sub|mul)\(\d,\d\)")


class Calls(AgentInstance):
    """The reward is 1 for the right call, 0.5 for another call that can be carried out, and 0 for everything else."""

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """240 questions to train on."""
        return read_tasks(FOLDER / "questions.jsonl")

    @classmethod
    def eval_tasks(cls) -> Iterable[Task]:
        """60 other questions, on which nothing is trained."""
        return read_tasks(FOLDER / "held_out.jsonl")

    def solve(self, state: StepState) -> str:
        """Return the right call, for `agentrl check`."""
        return str(state.label)

    def step(self, state: StepState) -> StepResult:
        """Compare the call with the right one."""
        call = state.action_text
        right = call == state.label
        return StepResult(1.0 if right else 0.5 if CALL.fullmatch(call) else 0.0, terminated=True, score=float(right))


def read_tasks(path: Path) -> list[Task]:
    """Return the questions of a file, with the call that answers each."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [Task(row["prompt"], label=row["label"], id=row["label"]) for row in rows]
