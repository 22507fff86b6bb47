"""Answers that know nothing, the label among wrong ones, and repeated actions, against environments that pay them or do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.check.shortcuts import check_shortcuts
from tests.unit.check.support import BROKEN, played

HEAD = """
from agentrl import AgentInstance, ResetResult, StepResult, Task


class Numbers(AgentInstance):
    @classmethod
    def tasks(cls):
        return [Task(f"What is {number}+1000?", label=str(number + 1000)) for number in range(6)]

    def reset(self, state):
        return ResetResult(state.task.prompt)


"""

BODIES = {
    "label-loses": ("-float(state.action_text.strip() == state.label)", {"label-loses"}),
    "label earns as much": ("0.3 + 0.1 * (state.action_text == '12')", {"label-loses"}),
    "label loses but in one task": ("(1 if state.label == '1001' else -1) * float(state.action_text.strip() == state.label)", set()),
    "nothing is paid for": ("0.1 * (len(state.action_text) > 5000)", set()),
    "label among others": ("float(state.label in state.action_text)", {"label-contained"}),
    "label at the end": ("float(state.action_text.split()[-1:] == [state.label])", set()),
    "label in one of two": ("float(state.label in state.action_text) - 0.5 * (' ' in state.action_text)", set()),
}


def file_with(folder: Path, step: str, tasks: str = "") -> str:
    body = f"class Checked(Numbers):\n{tasks}    def step(self, state):\n        return StepResult({step}, terminated=True)\n"
    (folder / "checked.py").write_text(HEAD.lstrip() + body)
    return f"{folder}/checked.py:Checked"


async def found(env: str) -> set[str]:
    context = await played(env, episodes=8)
    before = {finding.id for finding in context.report.findings}
    await check_shortcuts(context)
    return {finding.id for finding in context.report.findings} - before


@pytest.mark.anyio
@pytest.mark.parametrize("name", list(BODIES))
async def test_the_label_is_played_against_answers_that_know_nothing_and_among_wrong_ones(name: str, tmp_path: Path) -> None:
    step, expected = BODIES[name]
    assert await found(file_with(tmp_path, step)) == expected


@pytest.mark.anyio
async def test_labels_of_three_tasks_are_not_judged(tmp_path: Path) -> None:
    three = "    @classmethod\n    def tasks(cls):\n        return Numbers.tasks()[:3]\n\n"
    assert await found(file_with(tmp_path, "-float(state.action_text.strip() == state.label)", three)) == set()


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["label earns as much", "label among others"])
async def test_three_tasks_say_too_little(name: str, tmp_path: Path) -> None:
    three = "    @classmethod\n    def tasks(cls):\n        return Numbers.tasks()[:3]\n\n"
    assert await found(file_with(tmp_path, BODIES[name][0], three)) == set()


LOOKS = """class Checked(Numbers):
    def reset(self, state):
        return ResetResult(f"{state.task.prompt} Write LOOK to see it.")

    def step(self, state):
        if state.action_text == "LOOK":
            return StepResult(PRICE, "You see a number.", terminated=ENDS)
        return StepResult(float(state.action_text == state.label), terminated=True)
"""


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("price", "ends", "expected"),
    [
        ("0.6", "False", {"reward-repeats"}),
        ("0.6", "state.turn == 1", set()),
        ("0.125", "False", set()),
        ("0.126", "False", {"reward-repeats"}),
    ],
)
async def test_three_paid_turns_make_a_repetition_if_they_earn_more_than_the_end(
    price: str, ends: str, expected: set[str], tmp_path: Path
) -> None:
    (tmp_path / "checked.py").write_text(HEAD.lstrip() + LOOKS.replace("PRICE", price).replace("ENDS", ends))
    assert await found(f"{tmp_path}/checked.py:Checked") == expected


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "expected"), [("PaysEveryLook", {"reward-repeats"}), ("PaysLookALittle", set()), ("TakesTheLastNumber", set())]
)
async def test_repeated_actions_may_not_earn_more_than_the_best_end(name: str, expected: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BROKEN))
    assert await found(f"{BROKEN}/bad_learning.py:{name}") == expected
