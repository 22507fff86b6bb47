import json
from typing import Any

import pytest

from agentrl import StepResult, StepState
from agentrl.suites.load import load_agent
from tests.sandboxes import needs_sandbox
from tests.unit.envs.play import ENVS, load

pytestmark = [pytest.mark.anyio, needs_sandbox]

Code = load("code")
module = __import__("sys").modules[Code.__module__]
TASKS = {task.id: task for task in Code.tasks()}

SOLUTIONS = {
    "clamp": "def clamp(x, low, high): return min(max(x, low), high)",
    "letters": "def letters(t):\n    return {c: t.count(c) for c in t if c != ' '}",
    "palindrome": "Here it is:\n```python\ndef palindrome(t):\n    return t == t[::-1]\n```\nGood luck!",
}


async def say(task: Any, text: str, turn: int = 0) -> StepResult:
    return await Code().step(StepState(task=task, label=task.label, action_text=text, turn=turn))


@pytest.mark.parametrize("name", SOLUTIONS)
async def test_right_code_passes(name: str) -> None:
    result = await say(TASKS[f"{name}-0"], SOLUTIONS[name])
    assert (result.reward, result.terminated, result.score, result.info) == (1.0, True, 1.0, {"passed": 1.0})
    assert (await say(TASKS[f"{name}-3"], SOLUTIONS[name], turn=1)).reward == 0.5


async def test_wrong_code_is_shown_a_failing_test_and_may_be_written_again_once() -> None:
    task = TASKS["clamp-0"]
    result = await say(task, "def clamp(x, low, high): return max(x, low)")
    assert (result.reward, result.terminated, result.score) == (0.0, False, 0.0)
    assert 0 < result.info["passed"] < 1
    assert str(result.observation).startswith("It fails: clamp(")
    assert (await say(task, "def clamp(x, low, high): return max(x, low)", turn=1)).terminated


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def add(a, b", "SyntaxError: '(' was never closed"),
        ("def plus(a, b): return a + b", "KeyError: 'add'"),
        ("def add(a, b): return a + c", "raised NameError: name 'c' is not defined"),
        ("def add(a, b): return {1, 2}", "returned '{1, 2}'"),
        ("raise SystemExit", "it fails"),
        ("import os; os._exit(0)", "it fails"),
        ("print('[' + ', '.join(['{\"value\": 1}'] * 12) + ']'); import os; os._exit(0)", "it fails"),
        ("class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()", "returned '<answer.Any"),
        ("", "KeyError: 'add'"),
        ("I would add the two numbers.", "SyntaxError"),
    ],
)
async def test_code_that_fails_or_cheats_earns_nothing(code: str, problem: str) -> None:
    result = await say(TASKS["add-0"], code)
    assert (result.reward, result.terminated, result.info["passed"] < 1) == (0.0, False, True)
    assert problem.lower() in str(result.observation).lower()


async def test_a_sandbox_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(code: str) -> str:
        return "MemoryError"

    monkeypatch.setattr(module, "run_python", broken)
    with pytest.raises(RuntimeError, match="the sandbox for tests does not work: MemoryError"):
        await say(TASKS["add-0"], SOLUTIONS["clamp"])


async def test_endless_code_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    run = module.run_python
    monkeypatch.setattr(module, "run_python", lambda code: run(code, timeout_s=3.0))
    result = await say(TASKS["add-0"], "while True: pass")
    assert "[stopped after 3 s]" in str(result.observation)


def test_the_reference_solutions_differ_from_each_other_and_are_plain_json() -> None:
    from random import Random

    for head, (_, solution, inputs) in module.PROBLEMS.items():
        rng = Random(head)
        values = [json.dumps(solution(*inputs(rng))) for _ in range(20)]
        assert len(set(values)) > 1, head
    assert len(TASKS) == 120
    assert load_agent(str(ENVS / "code.py")).name == "Code"
