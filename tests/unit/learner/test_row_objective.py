"""Objectives of supervised and preference training on the learner: losses and gradients against formulas on rows that run alone.

The gradient does not depend on the layout: kernels, prefix trees and micro-batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algo.facts import facts_of
from agentrl.algo.objectives import OBJECTIVES
from agentrl.algo.objectives.distill import DistillOptions, generalized_jsd
from agentrl.algo.objectives.dpo import PAIR_LOSSES, SORTED, DpoOptions, PairRatios
from agentrl.algo.objectives.kto import KtoOptions, kahneman_tversky
from agentrl.algo.objectives.orpo import OrpoOptions, odds_ratio
from agentrl.algo.objectives.process_reward_model import step_cross_entropy
from agentrl.algo.objectives.reward_model import RewardModelOptions
from agentrl.algo.objectives.sft import SftOptions
from agentrl.algo.options import NoOptions
from agentrl.algo.plan import AlgoConfig
from agentrl.core.errors import LearnerError
from agentrl.core.types import ints
from agentrl.learner.engine import TrainEngine, join
from agentrl.learner.plan import LearnerConfig
from agentrl.learner.row_objective import LabelledRows
from agentrl.learner.rows import TokenRow
from agentrl.learner.settings import LearnerSettings, ObjectiveSettings
from agentrl.learner.state import LearnerState, load_state
from tests.learner_support import VOCABULARY, largest_difference, write_experts, write_model

ROWS = 6
SMOOTHED = ("cdpo", "robust", "exo_pair", "aot")
DPO = [DpoOptions(loss=loss, beta=0.3, label_smoothing=0.1 if loss in SMOOTHED else 0.0) for loss in PAIR_LOSSES]  # type: ignore[arg-type]
CASES: list[tuple[str, Any]] = [
    ("sft", SftOptions()),
    ("sft", SftOptions(loss="dft")),
    *(("dpo", options) for options in DPO),
    ("kto", KtoOptions(beta=0.4, desirable_weight=1.5, undesirable_weight=0.5)),
    ("orpo", OrpoOptions(beta=0.25)),
    ("reward-model", RewardModelOptions(center_rewards_coefficient=0.1)),
    ("process-reward-model", NoOptions()),
    ("distill", DistillOptions(beta=0.3, temperature=1.5)),
    ("distill", DistillOptions(beta=0.0)),
    ("distill", DistillOptions(beta=1.0)),
]
TASKS = {"reward-model": "SEQ_CLS", "process-reward-model": "TOKEN_CLS"}
TINY = {"learner_backend": "torch", "zero_stage": 0, "learning_rate": 1e-2, "max_grad_norm": 1e9}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Reference and teacher: another model."""
    return write_model(tmp_path_factory.mktemp("other"), seed=3)


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def rows_of(sequences: list[tuple[list[int], list[int]]], **rest: Any) -> LabelledRows:
    """Rows of tokens and of the places that are read."""
    made = tuple(TokenRow(tokens=ints(ids), reads=ints(reads)) for ids, reads in sequences)
    counts = torch.tensor([len(row.reads) for row in made])
    return LabelledRows(
        rows=made,
        row_lengths=torch.tensor([len(row.tokens) for row in made]),
        row_actions=counts,
        row=torch.arange(len(made)).repeat_interleave(counts),
        **rest,
    )


def answers(pairs: list[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[int]]]:
    """Sequences of prompts with answers, all tokens of which are trained."""
    return [(prompt + answer, list(range(len(prompt) - 1, len(prompt) + len(answer) - 1))) for prompt, answer in pairs]


def ragged(name: str, number: int = ROWS) -> LabelledRows:
    """Rows whose prompts and answers differ in length; both answers of a pair begin with the same prompt, some of them alike beyond it."""
    prompts = [tokens(9 + 2 * each, each) for each in range(number)]
    first = [tokens(2 + each, 10 + each) for each in range(number)]
    second = [[*first[each][:1], *tokens(5 - each % 3, 20 + each)] for each in range(number)]
    if name in ("sft", "distill"):
        return rows_of(answers(list(zip(prompts, first, strict=True))))
    if name == "process-reward-model":
        sequences = [(prompt + answer, [len(prompt), len(prompt) + len(answer) - 1]) for prompt, answer in zip(prompts, first, strict=True)]
        return rows_of(sequences, labels=torch.tensor([float(place % 3 > 0) for place in range(2 * number)]))
    if name == "kto":
        mismatched = rows_of(answers([(prompt, first[place - 1]) for place, prompt in enumerate(prompts)]))
        good = torch.tensor([place % 3 > 0 for place in range(number)])
        return rows_of(answers(list(zip(prompts, first, strict=True))), columns={"desirable": good}, companions=mismatched)
    pairs = [(prompt, answer) for prompt, *both in zip(prompts, first, second, strict=True) for answer in both]
    if name == "reward-model":
        margins = (0.1 * torch.arange(number)).repeat_interleave(2)
        ends = [(prompt + answer, [len(prompt + answer) - 1]) for prompt, answer in pairs]
        return rows_of(ends, columns={"margin": margins}, paired=True)
    return rows_of(answers(pairs), paired=True)


def started(model: str, name: str, options: Any, other: str, algo: AlgoConfig | None = None, **learner: Any) -> LearnerState:
    return load_state(settings_of(model, name, options, other, algo, **learner), join("torch", 0, 1, device="cpu"))


def settings_of(
    model: str, name: str, options: Any, other: str, algo: AlgoConfig | None = None, *, num_steps: int = 10, **learner: Any
) -> LearnerSettings:
    """Settings of a learner with an objective; `other` is its reference, or its teacher."""
    facts = facts_of(OBJECTIVES[name])
    objective = ObjectiveSettings(
        name=name,
        options=options,
        reference=other if facts.reference else "",
        teacher=other if facts.reads == "divergence" else "",
        task=TASKS.get(name, "CAUSAL_LM"),
    )
    return LearnerSettings(
        model=model,
        learner=LearnerConfig(**(TINY | learner)),
        algo=algo or AlgoConfig(),
        num_steps=num_steps,
        max_new_tokens=0,
        objective=objective,
    )


def one_step(state: LearnerState, rows: LabelledRows) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics of a step, and its gradient."""
    found: dict[str, Tensor] = {}
    engine, update = state.models.policy, TrainEngine.update

    def collect(rate: float) -> float | None:
        found.update({name: part.grad.clone() for name, part in engine.module.named_parameters() if part.grad is not None})
        return update(engine, rate)

    engine.update = collect  # type: ignore[method-assign]
    return state.train_rows(0, rows), found


def formula(name: str, options: Any, rows: LabelledRows, model: Any, other: Any) -> Tensor:
    """The loss of a step, from passes of single rows through plain models."""
    if name == "sft":
        logprobs = torch.cat(alone(model, rows))
        return (-logprobs * (logprobs.detach().exp() if options.loss == "dft" else 1.0)).mean()
    if name == "distill":
        student, teacher = (torch.cat(logits_of(of, rows)) for of in (model, other))
        return generalized_jsd(student, teacher, beta=options.beta, temperature=options.temperature).mean()
    if name in TASKS:
        return judged(name, rows, model)
    own, lengths = sums(model, rows), rows.row_actions.float()
    if name == "orpo":
        chosen, rejected = (own / lengths).view(-1, 2).unbind(1)
        return -own[::2].sum() / lengths[::2].sum() + options.beta * odds_ratio(chosen, rejected)[0].mean()
    if name == "kto":
        assert rows.companions is not None
        with torch.no_grad():
            z = (sums(model, rows.companions) - sums(other, rows.companions)).mean().clamp(min=0)
        weights = {"desirable_weight": options.desirable_weight, "undesirable_weight": options.undesirable_weight}
        return kahneman_tversky(own - sums(other, rows), rows.columns["desirable"], z, beta=options.beta, **weights).mean()
    ratios = PairRatios(*(half for each in (own, sums(other, rows), lengths) for half in each.view(-1, 2).unbind(1)))
    return (
        compared_by_rank(ratios, options)
        if options.loss in SORTED
        else PAIR_LOSSES[options.loss](ratios, options.beta, options.label_smoothing).mean()
    )


def logits_of(of: Any, rows: LabelledRows) -> list[Tensor]:
    return [of(torch.tensor([row.tokens.tolist()])).logits[0][row.reads.tolist()] for row in rows.rows]


def alone(of: Any, rows: LabelledRows) -> list[Tensor]:
    """Log-probabilities of the trained tokens of each row."""
    parts = zip(logits_of(of, rows), own_targets(rows), strict=True)
    return [each.log_softmax(-1).gather(-1, target[:, None])[:, 0] for each, target in parts]


def sums(of: Any, rows: LabelledRows) -> Tensor:
    return torch.stack([each.sum() for each in alone(of, rows)])


def judged(name: str, rows: LabelledRows, model: Any) -> Tensor:
    """The loss of a head, read at the places of each row."""
    bodies = [model.model(torch.tensor([row.tokens.tolist()])).last_hidden_state[0][row.reads.tolist()] for row in rows.rows]
    outputs = model.score(torch.cat(bodies))
    if name == "process-reward-model":
        assert rows.labels is not None
        return step_cross_entropy(outputs, rows.labels).mean()
    good, bad = outputs[:, 0].view(-1, 2).unbind(1)
    return (-torch.nn.functional.logsigmoid(good - bad - rows.columns["margin"][::2]) + 0.1 * (good + bad) ** 2).mean()


def compared_by_rank(ratios: PairRatios, options: DpoOptions) -> Tensor:
    """The losses of Melnyk et al., with both sides sorted."""
    left, right = ratios.chosen, ratios.rejected
    if options.loss == "aot":
        left, right = ratios.policy_chosen - ratios.policy_rejected, ratios.reference_chosen - ratios.reference_rejected
    difference = options.beta * (left.sort().values - right.sort().values)
    good, bad = torch.nn.functional.logsigmoid(difference), torch.nn.functional.logsigmoid(-difference)
    return (-(1 - options.label_smoothing) * good - options.label_smoothing * bad).mean()


def named(case: tuple[str, Any]) -> str:
    return "-".join(str(part) for part in (case[0], *vars(case[1]).values()))


@pytest.mark.parametrize("case", CASES, ids=named)
def test_the_loss_and_the_gradient_of_a_step_are_those_of_the_formula(case: tuple[str, Any], tiny_model: str, other: str) -> None:
    """Micro-batches of 40 tokens hold two or three rows; what belongs to a step is that of all."""
    name, options = case
    rows, state = ragged(name), started(tiny_model, name, options, other, micro_batch_tokens=40)
    plain = state.policy
    second = None if state.models.reference is None and state.models.teacher is None else load(other)
    expected = formula(name, options, rows, plain, second)
    expected.backward()
    gradient = {f"model.{part}": parameter.grad.clone() for part, parameter in plain.named_parameters() if parameter.grad is not None}
    plain.zero_grad()
    metrics, found = one_step(state, rows)
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-5, rel=1e-5)
    assert metrics["micro_batches"] > 2
    scale = max(float(part.abs().max()) for part in gradient.values())
    assert largest_difference(found, gradient) < 2e-5 * scale
    assert scale > 1e-4


def load(model: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).requires_grad_(False)


SPREAD = [
    ("sft", SftOptions()),
    ("dpo", DpoOptions(beta=0.3)),
    ("dpo", DpoOptions(loss="aot_unpaired", beta=0.3)),
    ("kto", KtoOptions(beta=0.4)),
    ("orpo", OrpoOptions(beta=0.25)),
    ("reward-model", RewardModelOptions()),
    ("process-reward-model", NoOptions()),
    ("distill", DistillOptions()),
]


@pytest.mark.parametrize("case", SPREAD, ids=named)
def test_the_gradient_does_not_depend_on_the_layout(case: tuple[str, Any], tiny_model: str, other: str) -> None:
    """Rows alone or together, padded or back to back, with prompts computed once or again."""
    name, options = case
    rows, found = ragged(name), []
    for learner in (
        {"micro_batch_tokens": 1, "share_prompts": False},
        {"micro_batch_tokens": 10_000},
        {"micro_batch_tokens": 64, "attn_implementation": "varlen"},
        {"micro_batch_tokens": 10_000, "attn_implementation": "varlen", "share_prompts": False},
    ):
        metrics, gradient = one_step(started(tiny_model, name, options, other, **learner), rows)
        found.append((metrics, gradient))
    first, gradient = found[0]
    scale = max(float(part.abs().max()) for part in gradient.values())
    own = [figure for figure in first if "/" not in figure or figure.split("/")[0] in ("reward", "logprob", "label")]
    for metrics, parts in found[1:]:
        assert largest_difference(parts, gradient) < 1e-5 * scale
        for figure in {*own} - {"micro_batches", "padding", "shared_prompts", "grad_norm"}:
            assert metrics[figure] == pytest.approx(first[figure], abs=2e-5, rel=1e-5), figure
    assert first["micro_batches"] > found[1][0]["micro_batches"] == 1.0
    if facts_of(OBJECTIVES[name]).unit == "pair" and name != "reward-model":
        assert found[1][0]["shared_prompts"] > 0.2
        assert first["shared_prompts"] == 0.0


def test_metrics_are_means_over_the_step(tiny_model: str, other: str) -> None:
    state, rows = started(tiny_model, "sft", SftOptions(), other, micro_batch_tokens=40), ragged("sft")
    rows = rows_of([(likely(state.policy, row.tokens.tolist(), row.reads.tolist()), row.reads.tolist()) for row in rows.rows])
    logits = [state.policy(torch.tensor([row.tokens.tolist()])).logits[0][row.reads.tolist()] for row in rows.rows]
    p = torch.cat(logits).detach().softmax(-1)
    metrics = state.evaluate_rows(0, [rows])
    assert 0.1 < metrics["token_accuracy"] < 1.0
    assert metrics["entropy"] == pytest.approx(-(p * p.log()).sum(-1).mean().item(), abs=1e-5)
    hits = [int(p[place].argmax()) == int(torch.cat(own_targets(rows))[place]) for place in range(len(p))]
    assert metrics["token_accuracy"] == pytest.approx(sum(hits) / len(hits))


def likely(model: Any, ids: list[int], reads: list[int]) -> list[int]:
    """A row whose last trained token is the likeliest one."""
    with torch.no_grad():
        return [*ids[: reads[-1] + 1], int(model(torch.tensor([ids])).logits[0, reads[-1]].argmax())]


def own_targets(rows: LabelledRows) -> list[Tensor]:
    return [torch.tensor(row.tokens.tolist())[torch.tensor(row.reads.tolist()) + 1] for row in rows.rows]


@pytest.mark.parametrize("case", [SPREAD[1], SPREAD[3], SPREAD[5]], ids=named)
def test_an_evaluation_has_the_metrics_of_a_step_and_changes_nothing(case: tuple[str, Any], tiny_model: str, other: str) -> None:
    name, options = case
    state, rows = started(tiny_model, name, options, other, micro_batch_tokens=40), ragged(name)
    before = state.digests()
    found = state.evaluate_rows(0, [rows])
    assert state.digests() == before
    trained = state.train_rows(0, rows)
    for figure in {*found} - {"loss/objective"}:
        assert found[figure] == pytest.approx(trained[figure], abs=1e-6, rel=1e-6), figure
    assert {"loss"} < {*found}


def test_the_loss_of_an_evaluation_is_a_mean_over_the_rows_of_all_blocks(tiny_model: str, other: str) -> None:
    state = started(tiny_model, "sft", SftOptions(), other)
    small, large = ragged("sft", 2), ragged("sft", 6)
    losses = [state.evaluate_rows(0, [rows])["loss"] for rows in (small, large)]
    counts = [rows.num_actions for rows in (small, large)]
    expected = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert state.evaluate_rows(0, [small, large])["loss"] == pytest.approx(expected, rel=1e-6)


def test_experts_are_balanced_over_the_step(tmp_path: Path, other: str) -> None:
    """The balance is that of all tokens of the step, whatever micro-batches they are in."""
    model, rows = write_experts(tmp_path / "experts", norm_topk_prob=True), ragged("sft")
    algo = AlgoConfig(aux_loss_coef=0.5)
    found = [
        one_step(started(model, "sft", SftOptions(), other, algo, micro_batch_tokens=size), rows)[0]["loss/balance"] for size in (30, 1000)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] > 0.5


def test_rows_need_an_objective(tiny_model: str) -> None:
    settings = LearnerSettings(
        model=tiny_model,
        learner=LearnerConfig(**TINY),
        algo=AlgoConfig(),
        num_steps=1,
        max_new_tokens=1,  # type: ignore[arg-type]
    )
    state = load_state(settings, join("torch", 0, 1, device="cpu"))
    with pytest.raises(LearnerError, match=r"LearnerSettings\.objective"):
        state.train_rows(0, ragged("sft"))
