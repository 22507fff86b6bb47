"""An executor of one's own on real vLLM and DeepSpeed, with stop strings that only its calls ask for."""

from pathlib import Path

import pytest

from tests.e2e.runs import succeeded, train

AGENT = """
import re
from agentrl import Executor, StepResult, Task

class Drafts(Executor):
    @classmethod
    def tasks(cls):
        return [Task(f"What is {a}+{b}?", label=str(a + b)) for a in range(10) for b in range(10)]

    async def execute(self, task, llm):
        prompt = llm.encode_prompt(task.prompt)
        first = await llm.generate(prompt, {"stop": list("123456789")})
        second = await llm.generate(first.ids + llm.encode_next("Sure?", first))
        other = await llm.generate(prompt)
        digits = re.findall("[1-9]", first.text)
        stopped = digits == [first.text[-1]] if digits else first.text[-1:] not in "123456789"
        return StepResult(float(other.text == task.label), info={"stopped": stopped, "digits": len(digits)})
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_executor_trains(tmp_path: Path) -> None:
    path = tmp_path / "drafts.py"
    path.write_text(AGENT)
    sizes = ("--runtime", "local", "--groups-per-step", "2", "--n-samples-per-prompt", "4", "--max-new-tokens", "8", "--no-save-model")
    run = succeeded(train(tmp_path / "run", "--num-steps", "2", *sizes, agent=path))
    assert run.summary["ledger"]["trained"] == 4
    for row in run.metrics:
        assert row["env/stopped"] == 1.0
        assert row["env/digits"] > 0
        assert (row["episode/turns_mean"], row["episode/count"], row["rows"]) == (3.0, 8.0, 16.0)
        assert row["mismatch/kl"] < 1e-6
