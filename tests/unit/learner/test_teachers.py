"""Training steps on the scores of a served teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.algo.distillation import top_k_divergence
from agentrl.core.errors import BatchError
from agentrl.core.teaching import TeacherScores
from agentrl.core.types import Group, Turn, ints
from agentrl.learner.batch import collate
from agentrl.learner.teaching import with_hints, with_scores
from tests.learner_support import action_targets, gradients, largest_difference, make_settings, write_model
from tests.unit.learner.test_algorithms import GROUPS, logprobs, started


def at_one(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The groups as sampled at temperature 1."""
    return tuple(
        replace(g, trajectories=tuple(replace(t, turns=tuple(replace(u, temperature=1.0) for u in t.turns)) for t in g.trajectories))
        for g in groups
    )


def taught(groups: Sequence[Group], teacher: torch.Tensor, top_k: int) -> tuple[Group, ...]:
    """The groups with scores of a teacher, whose log-probabilities are given for all action tokens in order. # [A, vocabulary]."""
    left = 0

    def scored(turn: Turn) -> Turn:
        nonlocal left
        rows = teacher[left : left + len(turn.token_ids)]
        left += len(turn.token_ids)
        best = rows.topk(top_k)
        chosen = rows[torch.arange(len(rows)), torch.from_numpy(turn.token_ids.astype(np.int64))]
        return replace(turn, teacher=TeacherScores(chosen.numpy(), best.indices.numpy().astype(np.int32), best.values.numpy()))

    return tuple(replace(g, trajectories=tuple(replace(t, turns=tuple(map(scored, t.turns))) for t in g.trajectories)) for g in groups)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("teacher"), seed=5, hidden_size=16)


def scores_of(model: str) -> torch.Tensor:
    """Log-probabilities of a model at temperature 1 for the action tokens of `GROUPS`. # [A, vocabulary]."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        parts = []
        for row in collate(GROUPS).rows:
            logits = policy(torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0]
            parts.append(logits[torch.from_numpy(row.action_positions.astype(np.int64)) - 1].log_softmax(-1))
    return torch.cat(parts)


@pytest.mark.parametrize("estimator", ["distillation", "group_norm"])
def test_scores_that_came_with_the_episodes_teach_as_a_model_on_the_learner_does(tiny_model: str, other: str, estimator: str) -> None:
    algo = {"advantage_estimator": estimator, "teacher_coef": 0.3}
    local = gradients(make_settings(tiny_model, algo={**algo, "teacher": other}), at_one(GROUPS))
    served = gradients(make_settings(tiny_model, algo={**algo, "teacher": f"engine:{other}"}), taught(at_one(GROUPS), scores_of(other), 1))
    assert largest_difference(local, served) < 1e-5
    assert max(float(part.abs().max()) for part in local.values()) > 1e-2


@pytest.mark.parametrize(("direction", "estimator"), [("forward", "distillation"), ("reverse", "group_norm")])
def test_the_divergence_is_added_to_the_loss(tiny_model: str, other: str, direction: str, estimator: str) -> None:
    """Against the written-out loss, alone and beside that of the reward."""
    groups, theirs = at_one(GROUPS), scores_of(other)
    algo = {"advantage_estimator": estimator, "teacher": f"engine:{other}", "teacher_loss": direction, "teacher_coef": 0.7}
    found = gradients(make_settings(tiny_model, algo=algo), taught(groups, theirs, 6))
    rewarded = gradients(make_settings(tiny_model, algo={"advantage_estimator": "group_norm"}), groups) if estimator == "group_norm" else {}
    model, _ = logprobs(tiny_model)
    parts = []
    for row in collate(groups).rows:
        logits = model(torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0]
        parts.append(logits[torch.from_numpy(row.action_positions.astype(np.int64)) - 1].log_softmax(-1))
    best = theirs.topk(6)
    (0.7 * top_k_divergence(torch.cat(parts).gather(-1, best.indices), best.values, direction)).mean().backward()
    expected = {f"model.{key}": parameter.grad + rewarded.get(f"model.{key}", 0.0) for key, parameter in model.named_parameters()}
    assert max(float(part.abs().max()) for part in expected.values()) > 1e-3
    assert largest_difference(found, expected) < 1e-5


def test_the_metric_is_the_divergence_and_falls(tiny_model: str, other: str) -> None:
    algo = {"advantage_estimator": "distillation", "teacher": f"engine:{other}", "teacher_loss": "forward"}
    groups, theirs = taught(at_one(GROUPS), scores_of(other), 8), scores_of(other)
    learner = started(tiny_model, algo=algo, learner={"learning_rate": 1e-3})
    divergences = [learner.train(step, *groups).metrics["distill/kl"] for step in range(6)]
    learner.close()
    best = theirs.topk(8)
    mine = scores_of(tiny_model).gather(-1, best.indices)
    assert divergences[0] == pytest.approx(float(top_k_divergence(mine, best.values, "forward").mean()), rel=1e-4)
    assert divergences[-1] < 0.8 * divergences[0]


def test_a_turn_without_scores_is_named(tiny_model: str, other: str) -> None:
    learner = started(tiny_model, algo={"advantage_estimator": "distillation", "teacher": f"engine:{other}"})
    with pytest.raises(BatchError, match="without scores of the teacher"):
        learner.train(0, *GROUPS)
    learner.close()


def test_a_served_teacher_is_not_loaded_by_the_learner(tiny_model: str, tmp_path: Path) -> None:
    learner = started(tiny_model, algo={"advantage_estimator": "distillation", "teacher": f"engine:{tmp_path}"})  # which holds no model
    assert learner._started.models.teacher is None
    learner.close()


def test_most_likely_tokens_that_the_policy_does_not_have_are_left_out() -> None:
    scores = TeacherScores(
        np.array([-1.0], np.float32), np.array([[3, 70, 5]], np.int32), np.array([[-0.5, -1.0, -2.0]], np.float32)
    ).within(64)
    assert scores.top_ids.tolist() == [[3, 0, 5]]
    assert scores.top_logprobs.tolist() == [[-0.5, float("-inf"), -2.0]]
    with pytest.raises(BatchError, match="shapes"):
        TeacherScores(np.zeros(2, np.float32), np.zeros((1, 3), np.int32), np.zeros((1, 3), np.float32))
    assert action_targets(collate(GROUPS)).ndim == 1


def hinted(groups: Sequence[Group], hint: Sequence[int]) -> tuple[Group, ...]:
    """The groups with some tokens before the prompt of each context, as the teacher of self-distillation reads them."""

    def with_hint(number: int, turn: Turn) -> Turn:
        begins = number == 0 or turn.fresh
        return replace(turn, hinted_ids=ints([*hint, *turn.prompt_ids.tolist()])) if begins else turn

    return tuple(
        replace(g, trajectories=tuple(replace(t, turns=tuple(with_hint(n, u) for n, u in enumerate(t.turns))) for t in g.trajectories))
        for g in groups
    )


@pytest.mark.parametrize(("stage", "share"), [(0, True), (0, False), pytest.param(3, True, marks=pytest.mark.slow)])
def test_the_policy_teaches_itself_with_a_hint_and_no_gradient_through_it(tiny_model: str, stage: int, share: bool) -> None:
    """Against the written-out step."""
    groups, hint = at_one(GROUPS), [9, 33, 2]
    algo = {"advantage_estimator": "distillation", "teacher": "self"}
    found = gradients(make_settings(tiny_model, algo=algo, learner={"zero_stage": stage, "share_prompts": share}), hinted(groups, hint))
    model, _ = logprobs(tiny_model)
    batch, new, theirs = collate(groups), [], []
    for row in batch.rows:
        tokens, places = torch.from_numpy(row.tokens.astype(np.int64)), torch.from_numpy(row.action_positions.astype(np.int64))
        targets = tokens[places][:, None]
        new.append(model(tokens[None]).logits[0, places - 1].log_softmax(-1).gather(-1, targets)[:, 0])
        with torch.no_grad():
            longer = torch.cat([torch.tensor(hint), tokens])
            theirs.append(model(longer[None]).logits[0, places - 1 + len(hint)].log_softmax(-1).gather(-1, targets)[:, 0])
    own = torch.cat(new)
    weights = (own.detach() - batch.logprobs).exp().clamp(max=2.0)
    (-weights * -(own.detach() - torch.cat(theirs)) * own).mean().backward()
    expected = {f"model.{key}": parameter.grad for key, parameter in model.named_parameters()}
    assert max(float(part.abs().max()) for part in expected.values()) > 1e-3
    assert largest_difference(found, expected) < 1e-5


def test_without_a_hint_the_policy_learns_nothing_of_itself(tiny_model: str) -> None:
    learner = started(tiny_model, algo={"advantage_estimator": "distillation", "teacher": "self"})
    metrics = learner.train(0, *at_one(GROUPS)).metrics
    again = learner.train(1, *hinted(at_one(GROUPS), [9, 33, 2])).metrics
    learner.close()
    assert metrics["distill/kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(0.0, abs=1e-5)
    assert abs(again["distill/kl"]) > 1e-3
    assert again["shared_prompts"] == metrics["shared_prompts"]  # the figures of the layout are those of the trained rows


def test_rows_with_hints_are_as_long_as_they_are_and_have_the_same_actions() -> None:
    batch = collate(hinted(at_one(GROUPS), [9, 33, 2]))
    found = with_hints(batch)
    assert found.row_lengths.tolist() == [len(row.tokens) for row in found.rows]
    assert (found.row_lengths - batch.row_lengths).tolist() == [3] * batch.num_rows
    assert [row.tokens[row.action_positions].tolist() for row in found.rows] == [
        row.tokens[row.action_positions].tolist() for row in batch.rows
    ]


def action_scores(model: Any, rows: Any) -> torch.Tensor:
    """Log-probabilities of a model for the action tokens of some rows, with gradient. # [A, vocabulary]."""
    parts = []
    for row in rows:
        logits = model(torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0]
        predicted = logits[torch.from_numpy(row.action_positions.astype(np.int64)) - 1]
        parts.append((predicted / torch.from_numpy(row.temperatures.copy())[:, None]).log_softmax(-1))
    return torch.cat(parts)


@pytest.mark.parametrize(("direction", "top_k"), [("forward", 6), ("reverse", 6), ("forward", 100), ("reverse", 100)])
@pytest.mark.parametrize("own", [True, False])
def test_a_teacher_on_the_rank_is_compared_over_its_likely_tokens(
    tiny_model: str, other: str, direction: str, top_k: int, own: bool
) -> None:
    """The policy with a hint, and another model: against the written-out loss, where more tokens than there are mean all of them."""
    groups = hinted(GROUPS, [9, 33, 2])
    algo = {"advantage_estimator": "distillation", "teacher": "self" if own else other, "teacher_loss": direction, "teacher_top_k": top_k}
    found = gradients(make_settings(tiny_model, algo=algo), groups)
    model, _ = logprobs(tiny_model)
    batch = collate(groups)
    teacher = model if own else logprobs(other)[0]
    with torch.no_grad():
        theirs = action_scores(teacher, (with_hints(batch) if own else batch).rows)
    mine = action_scores(model, batch.rows)
    if top_k == 100:
        ahead, behind = (theirs, mine) if direction == "forward" else (mine, theirs)
        divergence = (ahead.exp() * (ahead - behind)).sum(-1)
    else:
        best = theirs.topk(top_k)
        divergence = top_k_divergence(mine.gather(-1, best.indices), best.values, direction)
    divergence.mean().backward()
    expected = {f"model.{key}": parameter.grad for key, parameter in model.named_parameters()}
    assert max(float(part.abs().max()) for part in expected.values()) > 1e-3
    assert largest_difference(found, expected) < 2e-5


def test_tokens_that_only_the_teacher_has_are_left_out() -> None:
    batch = collate(GROUPS)
    scores = torch.tensor([[-0.5, -0.1, -2.0, 70.0, 3.0]]).expand(batch.num_actions, -1)
    taught = with_scores(batch, scores, 64)
    assert taught.teacher is not None
    assert taught.teacher_ids is not None
    assert taught.teacher_top is not None
    assert taught.teacher[0] == -0.5
    assert taught.teacher_ids[0].tolist() == [0, 3]
    assert taught.teacher_top[0].tolist() == [float("-inf"), -2.0]


def test_a_divergence_in_the_loss_leaves_advantages_alone(tiny_model: str) -> None:
    """Also where the policy is scored before several updates, so that the sampled token could be compared as well."""
    algo = {"advantage_estimator": "distillation", "teacher": "self", "teacher_loss": "forward", "mini_batches": 2}
    learner = started(tiny_model, algo=algo)
    metrics = learner.train(0, *hinted(GROUPS, [9, 33, 2])).metrics
    learner.close()
    assert metrics["advantage/abs"] == 0.0
    assert metrics["distill/kl"] > 0.0
