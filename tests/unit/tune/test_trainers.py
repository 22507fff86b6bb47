"""The loss that each trainer takes of a batch, against its formula on numbers that a plain forward pass of each row alone gives."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.assets import tiny_model_path
from agentrl.config.methods import METHODS
from agentrl.resolve.tune import load_given
from agentrl.tune.row_table import Row
from tests.learner_support import write_shifted
from tests.unit.tune.plans import evaluated, rows_of, state_of

DATA = Path(__file__).parents[3] / "examples" / "tune"
ROWS = 6


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that differs from the bundled one in every weight: reference and teacher."""
    return write_shifted(tmp_path_factory.mktemp("other"))


def built(command: str, data: str, folder: Path, **settings: Any) -> tuple[Any, list[Row], dict[str, float]]:
    """The models of a run, a few rows, and their loss and metrics."""
    plan = load_given(
        METHODS[command], {"data": str(DATA / f"{data}.jsonl"), "batch_size": ROWS, "run_dir": str(folder), "shuffle": False, **settings}
    )
    rows, state = list(rows_of(plan).parts[0][:ROWS]), state_of(plan)
    return state, rows, evaluated(plan, state, rows)


@cache
def loaded(model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def logprobs(model: str, prompt: list[int], answer: list[int]) -> list[float]:
    """Log-probability of each token of an answer, by a forward pass without padding."""
    with torch.no_grad():
        logits = loaded(model)(torch.tensor([prompt + answer])).logits[0].double()
    found = torch.log_softmax(logits, -1)
    return [found[len(prompt) - 1 + place, token].item() for place, token in enumerate(answer)]


def log_ratios(row: Row, other: str, key: str) -> list[float]:
    prompt, answer = row["prompt_ids"], row[key]
    mine, theirs = (logprobs(model, prompt, answer) for model in (str(tiny_model_path()), other))
    return [a - b for a, b in zip(mine, theirs, strict=True)]


def log_sigmoid(value: float) -> float:
    return -math.log1p(math.exp(-value))


def dpo_terms(loss: str, chosen: list[float], rejected: list[float], beta: float, smoothing: float) -> float:
    """The loss of a pair by its formula, from log-ratios per token."""
    difference = sum(chosen) - sum(rejected)
    good, bad = -log_sigmoid(beta * difference), -log_sigmoid(-beta * difference)
    if loss == "sigmoid":
        return good
    if loss == "cdpo":
        return (1 - smoothing) * good + smoothing * bad
    if loss == "robust":
        return ((1 - smoothing) * good - smoothing * bad) / (1 - 2 * smoothing)
    if loss == "hinge":
        return max(0.0, 1 - beta * difference)
    if loss == "ipo_sum":
        return (difference - 1 / (2 * beta)) ** 2
    assert loss == "ipo"
    return (sum(chosen) / len(chosen) - sum(rejected) / len(rejected) - 1 / (2 * beta)) ** 2


@pytest.mark.parametrize("loss", ["sigmoid", "cdpo", "robust", "hinge", "ipo", "ipo_sum"])
def test_losses_of_pairs(loss: str, other: str, tmp_path: Path):
    smoothing = 0.2 if loss in ("cdpo", "robust") else 0.0
    _, rows, found = built("dpo", "pairs", tmp_path, loss=loss, beta=0.4, label_smoothing=smoothing, reference=other)
    terms = [dpo_terms(loss, log_ratios(row, other, "chosen_ids"), log_ratios(row, other, "rejected_ids"), 0.4, smoothing) for row in rows]
    rounding = 1e-5 if loss == "ipo_sum" else 1e-6  # the square of a sum over tokens
    assert found["loss"] == pytest.approx(sum(terms) / ROWS, rel=rounding, abs=1e-6)
    accuracy = sum(sum(log_ratios(row, other, "chosen_ids")) > sum(log_ratios(row, other, "rejected_ids")) for row in rows) / ROWS
    assert found["accuracy"] == pytest.approx(accuracy)


def test_kto(other: str, tmp_path: Path):
    _, rows, found = built("kto", "labelled", tmp_path, beta=0.3, desirable_weight=1.5, undesirable_weight=0.5, reference=other)
    assert {row["label"] for row in rows} == {True, False}
    others = [rows[place - 1]["completion_ids"] for place in range(ROWS)]  # answers to other prompts
    mismatched = [
        sum(log_ratios({**row, "completion_ids": answer}, other, "completion_ids")) for row, answer in zip(rows, others, strict=True)
    ]
    z = max(0.0, sum(mismatched) / ROWS)
    terms = []
    for row in rows:
        ratio = sum(log_ratios(row, other, "completion_ids"))
        value = 0.3 * (ratio - z) if row["label"] else 0.3 * (z - ratio)
        terms.append((1.5 if row["label"] else 0.5) * (1 - math.exp(log_sigmoid(value))))
    assert found["loss"] == pytest.approx(sum(terms) / ROWS, rel=2e-6, abs=2e-6)


def test_bradley_terry_with_margin_and_centring(tmp_path: Path):
    state, rows, found = built("reward-model", "helpful", tmp_path, margin_key="margin", center_rewards_coefficient=0.1)
    model = state.policy

    def score(ids: list[int]) -> float:
        with torch.no_grad():
            return float(model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1]))

    terms = []
    for row in rows:
        chosen, rejected = (score(row["prompt_ids"] + row[key]) for key in ("chosen_ids", "rejected_ids"))
        terms.append(-log_sigmoid(chosen - rejected - row["margin"]) + 0.1 * (chosen + rejected) ** 2)
    assert len({row["margin"] for row in rows}) > 1
    assert found["loss"] == pytest.approx(sum(terms) / ROWS, rel=2e-6, abs=2e-6)


def test_process_reward(tmp_path: Path):
    state, rows, found = built("process-reward-model", "steps", tmp_path)
    model = state.policy
    terms = []
    for row in rows:
        with torch.no_grad():
            logits = model(torch.tensor([row["input_ids"]])).logits[0].double()
        for place, label in enumerate(row["labels"]):
            if label >= 0:
                p = torch.softmax(logits[place], -1)[1].item()
                terms.append(-(label * math.log(p) + (1 - label) * math.log(1 - p)))
    assert len(terms) == 4 * ROWS
    assert found["loss"] == pytest.approx(sum(terms) / len(terms), rel=2e-6, abs=2e-6)


def test_odds_ratio_preference(tmp_path: Path):
    _, rows, found = built("orpo", "pairs", tmp_path, beta=0.25)
    ratios, likelihood, tokens = [], 0.0, 0
    for row in rows:
        chosen, rejected = (logprobs(str(tiny_model_path()), row["prompt_ids"], row[key]) for key in ("chosen_ids", "rejected_ids"))
        likelihood, tokens = likelihood - sum(chosen), tokens + len(chosen)
        p, q = (math.exp(sum(each) / len(each)) for each in (chosen, rejected))
        ratios.append(-log_sigmoid(math.log((p / (1 - p)) / (q / (1 - q)))))
    expected = likelihood / tokens + 0.25 * sum(ratios) / ROWS
    assert found["loss"] == pytest.approx(expected, rel=2e-6, abs=2e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distillation(beta: float, other: str, tmp_path: Path):
    _, rows, found = built("distill", "chats", tmp_path, teacher=other, beta=beta, temperature=1.5)
    terms = []
    models = [loaded(name) for name in (str(tiny_model_path()), other)]
    for row in rows:
        with torch.no_grad():
            q, p = (torch.softmax(model(torch.tensor([row["input_ids"]])).logits[0].double() / 1.5, -1) for model in models)
        for place, label in enumerate(row["labels"][1:]):
            if label != -100:
                mixture = beta * p[place] + (1 - beta) * q[place]
                first = (p[place] * (p[place] / mixture).log()).sum().item()
                second = (q[place] * (q[place] / mixture).log()).sum().item()
                forward = (p[place] * (p[place] / q[place]).log()).sum().item()
                reverse = (q[place] * (q[place] / p[place]).log()).sum().item()
                terms.append({0.0: forward, 1.0: reverse}.get(beta, beta * first + (1 - beta) * second))
    assert found["loss"] == pytest.approx(sum(terms) / len(terms), rel=2e-6, abs=2e-6)


def test_supervised_training_counts_trained_tokens_only(tmp_path: Path):
    _, rows, found = built("sft", "chats", tmp_path)
    model = loaded(str(tiny_model_path()))
    terms = []
    for row in rows:
        with torch.no_grad():
            alone = torch.log_softmax(model(torch.tensor([row["input_ids"]])).logits[0].double(), -1)
        terms += [-alone[place, label].item() for place, label in enumerate(row["labels"][1:]) if label != -100]
    assert found["loss"] == pytest.approx(sum(terms) / len(terms), rel=2e-6, abs=2e-6)
