"""The functions in docs/algorithms.md run, and its table of estimators says what their facts say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from agentrl.algo.compute import compute_advantages, compute_correction, compute_policy_loss
from agentrl.algo.estimators import ESTIMATORS, estimator_facts
from agentrl.algo.facts import CorrectionFacts, EstimatorFacts, FilterFacts, LossFacts
from agentrl.algo.filters import find_filter
from agentrl.algo.token_losses import LossInputs
from agentrl.core.summaries import GroupSummary
from tests.unit.algo.chosen import correction_inputs, correction_options, estimator_options, loss_options
from tests.unit.algo.ragged import outcome_inputs, ragged
from tests.unit.flow.fakes import member

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "mine.py"
    path.write_text("\n\n".join(blocks))
    return path


def test_the_estimator_of_the_page(file: Path) -> None:
    batch = ragged(1, groups=1, members=3)
    advantages = compute_advantages(
        f"{file}:best_of_group", outcome_inputs(batch, torch.tensor([0.0, 1.0, 0.5])), estimator_options(f"{file}:best_of_group")
    ).advantages
    assert advantages[batch.last].tolist() == [-1.0, 1.0, 0.0]


def test_the_loss_of_the_page(file: Path) -> None:
    new = torch.tensor([0.0, 0.5], requires_grad=True)
    inputs = LossInputs(new=new, old=torch.zeros(2), advantages=torch.tensor([1.0, 1.0]), sequence=torch.tensor([0, 0]))
    result = compute_policy_loss(f"{file}:soft_clip", inputs, loss_options(f"{file}:soft_clip", eps_clip_high=0.25))
    torch.testing.assert_close(result.per_token, torch.tensor([-1.0, 1.0 - float(torch.tensor(0.5).exp())]))


def test_the_correction_of_the_page(file: Path) -> None:
    old, rows = torch.tensor([0.0, 1.0, 0.05]), torch.tensor([0, 0, 1])
    inputs = correction_inputs(old, torch.zeros(3), rows, rows < 1, torch.ones(3))
    result = compute_correction(f"{file}:steady_sequences", inputs, correction_options(f"{file}:steady_sequences"))
    torch.testing.assert_close(result.weights, torch.tensor([0.0, 0.0, float(torch.tensor(0.05).exp())]))
    assert result.keep.tolist() == [False, False, True]


def test_the_filter_of_the_page(file: Path) -> None:
    def group(turns: int) -> GroupSummary:
        return GroupSummary(group_id=0, members=(member(1.0, num_turns=turns),), versions=(0, 0), seconds=1.0)

    judge = find_filter(f"{file}:short_enough")
    assert (judge(group(6)), judge(group(7))) == (None, "too_long")


def test_the_table_of_estimators_says_what_the_facts_say() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| [^|]* \| ([^|]*) \| [^|]* \| ([^|]*) \| (yes|1) \|", PAGE, re.MULTILINE)
    found = {name: row for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert set(found) == set(ESTIMATORS)
    for name, (_, scale, needs, gamma) in found.items():
        facts = estimator_facts(name)
        assert ("whitened" in scale, "critic" in needs, "n \\ge 2" in needs, gamma == "yes") == (
            facts.whitens,
            facts.needs_critic,
            facts.compares_group,
            facts.discounts,
        ), name


def test_the_table_of_facts_is_complete() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ((?:estimator|loss|correction|filter|, )+) \|", PAGE, re.MULTILINE))
    stated = [*EstimatorFacts.__slots__, *LossFacts.__slots__, *CorrectionFacts.__slots__, *FilterFacts.__slots__]
    assert set(rows) == set(stated)
