"""Rewards that a check must not mistake for constant, for shortcuts, or for one agent's."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.check.findings import Severity
from agentrl.check.report import print_report
from tests.unit.check.support import checked, ids, played

PROMPTS = str(Path(__file__).parents[2] / "openrlhf_files" / "prompts.jsonl")
VERIFIERS = {
    r"\boxed{label}": r"\\boxed\{([^{}]*)\}",
    "#### label": r"#### (-?\d+)$",
    "<answer>label</answer>": r"<answer>(.*?)</answer>",
    "<think></think><answer>label</answer>": r"^<think>.*?</think>\s*<answer>(.*?)</answer>$",
    "The answer is label": r"The answer is (.*)\.$",
    "Answer: label": r"^Answer: (\S+)$",
}
COIN = """
import random
from agentrl import AgentInstance, StepResult, Task

class Coin(AgentInstance):
    @classmethod
    def tasks(cls):
        return [Task(f"Coin {n}: heads or tails?", label=random.Random(n).choice(["heads", "tails"])) for n in range(48)]

    def step(self, state):
        return StepResult(float(state.action_text.strip() == state.label), terminated=True)

class Luck(Coin):
    def reset(self, state):
        self.luck = random.Random(state.seed).random() < 0.6

    def step(self, state):
        return StepResult(float(self.luck), terminated=True)
"""
DUEL = """
from agentrl import AgentInstance, StepResult, Task

class Duel(AgentInstance):
    agents = ("ann", "bob")

    @classmethod
    def tasks(cls):
        return [Task(f"Say the number {n}.", label=str(n)) for n in range(8)]

    def step(self, state):
        if state.agent == "ann":
            self.said = state.action_text
            return StepResult(0.0, state.task.prompt)
        won = (self.said == state.label) - (state.action_text == state.label and self.said != state.label) or -1
        return StepResult(0.0, terminated=True, rewards={"ann": float(won), "bob": -float(won)})
"""


def written(file: Path, body: str) -> str:
    file.write_text(f"import re\n\ndef reward(completion, label):\n    {body}\n")
    return str(file)


@pytest.mark.anyio
@pytest.mark.parametrize("form", VERIFIERS)
async def test_the_label_is_written_as_verifiers_expect_it(form: str, tmp_path: Path) -> None:
    body = f"found = re.search({VERIFIERS[form]!r}, completion, re.DOTALL)\n    return float(found is not None and found[1] == label)"
    context = await played(written(tmp_path / "verifier.py", body), prompts=PROMPTS)
    rewards = {episode.policy: episode.reward for episode in context.played}
    assert (context.form, rewards["label"], rewards[form]) == (form, 0.0, 1.0)


def test_a_verifier_with_a_form_is_not_constant(tmp_path: Path) -> None:
    body = "found = re.search(r'boxed{(.*)}', completion)\n    return float(found is not None and found[1] == label)"
    assert ids(checked(written(tmp_path / "boxed.py", body), prompts=PROMPTS)) == set()


def test_an_exact_match_earns_1_with_the_plain_label(tmp_path: Path) -> None:
    file = tmp_path / "exact.py"
    file.write_text("def reward(completion, label):\n    return float(completion == label)\n")
    assert [row["reward"] for row in checked(str(file), prompts=PROMPTS).policies if "label" in row["policy"]] == [1.0]


@pytest.mark.parametrize(("name", "found"), [("Coin", set()), ("Luck", {"label-loses"})])
def test_a_coin_is_not_solved_by_a_constant(name: str, found: set[str], tmp_path: Path) -> None:
    (tmp_path / "coin.py").write_text(COIN)
    assert ids(checked(f"{tmp_path}/coin.py:{name}")) == found


def test_a_zero_sum_game_shows_what_each_agent_earns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "duel.py"
    file.write_text(DUEL)
    report = checked(f"{file}:Duel")
    assert "reward-constant" not in ids(report, *Severity), report.findings
    rows = {row["policy"]: row["agents"] for row in report.policies}
    assert {name: earned["reward"] for name, earned in rows["label"].items()} == {"ann": 1.0, "bob": -1.0}
    assert {name: earned["reward"] for name, earned in rows["empty"].items()} == {"ann": -1.0, "bob": 1.0}
    print_report(report)
    shown = capsys.readouterr().out
    assert "\n  ann " in shown
    assert "-1.00" in shown
