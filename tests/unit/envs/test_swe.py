"""``envs/swe.py``: its repositories, its tools, and answers that attack the reward."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest

from agentrl import ResetState, StepResult, StepState
from agentrl.env.sandbox.spec import SandboxChoice, use_choice
from tests.sandboxes import IMAGE, container_engine, needs_sandbox
from tests.unit.envs.play import load

pytestmark = pytest.mark.anyio

Swe = load("swe")
TASKS = list(itertools.islice(Swe.tasks(), 40))
KINDS = [
    "none",
    pytest.param("local", marks=[needs_sandbox, pytest.mark.slow]),
    pytest.param("container", marks=pytest.mark.slow),
]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "container":
        container_engine()
    return str(request.param)


def repository(task):
    return Swe.judge.__globals__["make_repository"](task.seed)


async def play(task, kind, *calls: tuple[str, dict[str, str]]) -> tuple[list[StepResult], list[str]]:
    """The results of all turns and what the tools returned: calls one after another, and an answer without one."""
    use_choice(SandboxChoice(kind=kind, image=IMAGE) if kind == "container" else SandboxChoice(kind=kind))
    env, results = Swe(), []
    try:
        await env.reset(ResetState(task=task, observation=task.prompt, label=task.label, seed=0))
        texts = [f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>" for name, given in calls]
        for turn, text in enumerate([*texts, "It is repaired."]):
            results.append(await env.step(StepState(task=task, label=task.label, action_text=text, turn=turn, finish_reason="stop")))
    finally:
        await env.close()
    return results, [str(result.observation[-1]["content"]) for result in results[:-1]]


def change(task) -> dict[str, str]:
    """The edit that repairs a repository."""
    made = repository(task)
    lines = zip(made.wrong.splitlines(), made.right.splitlines(), strict=True)
    wrong, right = next((one, other) for one, other in lines if one != other)
    return {"path": made.module, "old": wrong, "new": right}


def test_every_kind_of_module_and_bug_comes_and_shows_in_the_tests():
    made = [repository(task) for task in TASKS]
    assert {each.module for each in made} == {"prices.py", "texts.py", "windows.py", "stock.py"}
    run_here = Swe.judge.__globals__["run_here"]
    for each in made:
        assert run_here(each.right, each.tests) == each.expected != run_here(each.wrong, each.tests)
        assert len({each.wrong for each in made}) > 30


def test_a_seed_makes_the_same_repository_and_those_of_the_evaluation_are_others():
    assert [repository(task) for task in TASKS[:5]] == [repository(task) for task in TASKS[:5]]
    evaluated = list(Swe.eval_tasks())
    assert not {task.seed for task in evaluated} & set(range(10**6))
    assert len({repr(repository(task)) for task in [*TASKS, *evaluated]}) == len(TASKS) + len(evaluated)


def test_the_repair_of_a_demonstration_is_one_edit():
    for task in TASKS:
        made = repository(task)
        assert made.wrong.count(made.repair[0]) == 1
        assert made.wrong.replace(*made.repair) == made.right


async def test_the_scripted_policy_repairs(kind):
    use_choice(SandboxChoice(kind=kind, image=IMAGE) if kind == "container" else SandboxChoice(kind=kind))
    env, task = Swe(), TASKS[3]
    await env.reset(ResetState(task=task, observation=task.prompt, label=task.label, seed=0))
    for turn in range(3):
        state = StepState(task=task, label=task.label, action_text="", turn=turn, finish_reason="stop")
        state["action_text"] = env.solve(state)
        result = await env.step(state)
    await env.close()
    assert (result.reward, result.terminated) == (1.0, True)


async def test_the_right_module_earns_1_and_the_one_found_0(kind):
    use_choice(SandboxChoice(kind=kind, image=IMAGE) if kind == "container" else SandboxChoice(kind=kind))
    assert [await Swe.try_solution(TASKS[0], solved=solved) for solved in (True, False)] == [1.0, 0.0]


@pytest.mark.slow
async def test_a_repair_by_the_tools_is_paid(kind):
    task = TASKS[1]
    results, told = await play(
        task, kind, ("bash", {"command": "python3 tests.py"}), ("edit", change(task)), ("bash", {"command": "false"})
    )
    assert "FAILED" in told[0]
    assert told[1] == f"{repository(task).module} is changed."
    assert "[exit code 1]" in told[2]
    assert (results[-1].reward, results[-1].terminated, results[-1].info["passed"]) == (1.0, True, 1.0)


async def test_an_edit_that_does_not_fit_is_told_and_changes_nothing():
    task = TASKS[2]
    absent, several = (("edit", {"path": repository(task).module, "old": old, "new": ""}) for old in ("no such text", "return"))
    results, told = await play(task, "none", absent, several, ("edit", {"path": "../outside", "old": "root", "new": ""}))
    assert all(text.startswith("Error:") for text in told)
    assert "is no file of the repository" in told[2]
    assert results[-1].reward == 0.0


FORGE = "import os; print('\\n[' + ', '.join(['[true, 0]'] * 12) + ']', flush=True); os._exit(0)"
NAMES = "total = cheapest = shorten = count = widest = means = rises = clip = apply = low"
EQUAL = "class Equal:\n    def __eq__(self, other): return True\n    def __repr__(self): return 'true'"


def attacks(module: str) -> Iterator[tuple[str, str]]:
    name = module.removesuffix(".py")
    yield "forged results", f'cat > {module} <<"EOF"\n{FORGE}\nEOF'
    yield (
        "an object equal to all",
        f'cat > {module} <<"EOF"\n{EQUAL}\n{NAMES} = lambda v: Equal()\nEOF',
    )
    yield "patched modules", f"(echo \"import sys, json; json.dumps = lambda *a, **k: '[]'; sys.exit(0)\"; cat {module}) > x; mv x {module}"
    yield (
        "tests that always pass",
        "echo 'print(\"ok\")' > tests.py; echo 'def f(): pass' > sitecustomize.py; echo 'raise SystemExit(0)' > json.py",
    )
    yield "hidden tests searched", f"find .. -name run_tests.py 2>/dev/null | head -1 | xargs -r cat > {name}.txt"
    yield "a child that writes later", f"(sleep 1; echo 'x = 1' > {module}) & true"
    yield "no module", f"rm {module}"
    yield "a link", f"ln -sf /etc/passwd {module}"
    yield "a pipe", f"rm {module}; ln -s /dev/null {module}"


FAST = ("forged results", "an object equal to all", "no module", "a link")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name, _ in attacks("prices.py")])
async def test_an_attack_earns_nothing(name, kind):
    module = repository(TASKS[3]).module
    results, _ = await play(TASKS[3], kind, ("bash", {"command": dict(attacks(module))[name]}))
    assert (results[-1].reward, results[-1].terminated) == (0.0, True)


@pytest.mark.slow
async def test_code_of_the_agent_cannot_name_a_result_that_it_did_not_compute():
    task = TASKS[3]
    made = repository(task)
    command = f'(cat {made.module}; echo; echo "import json; json.dumps = lambda *a, **k: str(a)") > x; mv x {made.module}'
    results, _ = await play(task, "none", ("edit", change(task)), ("bash", {"command": command}))
    assert results[-1].reward == 0.0
