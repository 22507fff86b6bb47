"""The gradient is that of the whole batch's loss, however the batch is laid out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.core.types import Group, Status
from agentrl.learner.batch import TurnRow, collate
from tests.learner_support import CollectingSender, action_targets, gradients, largest_difference, make_groups, make_settings, row_scores

GROUPS = make_groups(5, 3, seed=1)
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant")


def plain_gradients(
    model_dir: str,
    trained: torch.Tensor | None = None,
    *,
    groups: tuple[Group, ...] = GROUPS,
    prepare: Callable[[Any, TurnRow], None] = lambda model, row: None,
) -> dict[str, torch.Tensor]:
    """Policy gradient with group-normalised advantages and truncated weights, from the formula, one row at a time.

    `trained` says which action tokens count in the numerator; `prepare` is called with the model before each row.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    batch = collate(groups)
    rewards = batch.rewards.double()
    grouped = [rewards[batch.group == g] for g in range(batch.num_groups)]
    advantage = torch.cat([(r - r.mean()) / (r.std() + 1e-9) for r in grouped])[batch.episode]
    targets = action_targets(batch)
    for number, row in enumerate(batch.rows):
        prepare(model, row)
        scores = row_scores(model, row)
        for action, tempered in zip((batch.row == number).nonzero()[:, 0].tolist(), scores.double(), strict=True):
            if trained is not None and not trained[action]:
                continue
            new = tempered[targets[action]]
            weight = (new.detach() - batch.logprobs[action]).exp().clamp(max=2.0)
            (-weight * advantage[action] * new / batch.num_actions).backward(retain_graph=True)
    return {f"model.{name}": parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_gradient_is_that_of_the_formula(tiny_model: str) -> None:
    expected = plain_gradients(tiny_model)
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-2
    assert largest_difference(gradients(make_settings(tiny_model), GROUPS), expected) < 1e-5


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("budget", [1, 60])
def test_gradient_does_not_depend_on_zero_stage_or_micro_batches(tiny_model: str, stage: int, budget: int) -> None:
    whole = gradients(make_settings(tiny_model), GROUPS)
    parts = gradients(make_settings(tiny_model, learner={"zero_stage": stage, "micro_batch_tokens": budget}), GROUPS)
    assert largest_difference(whole, parts) < 1e-5


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_no_loss_or_aggregation_depends_on_micro_batches(tiny_model: str, loss: str, aggregation: str) -> None:
    algo = {"policy_loss": loss, "loss_aggregation": aggregation, "entropy_coef": 0.1, "init_kl_coef": 0.3, "use_kl_loss": True}
    whole = gradients(make_settings(tiny_model, algo=algo), GROUPS)
    rows = gradients(make_settings(tiny_model, algo=algo, learner={"micro_batch_tokens": 1}), GROUPS)
    assert largest_difference(whole, rows) < 1e-5


@pytest.mark.parametrize("loss", ["ipo", "gmpo", "clip_cov", "kl_cov"])
def test_no_newer_loss_depends_on_micro_batches(tiny_model: str, loss: str) -> None:
    """With the recorded log-probabilities as the old ones, the ratio is not 1 in the first update."""
    algo = {"policy_loss": loss, "old_logprobs": "behaviour", "cov_share": 0.3, "clip_cov_range": (-9.0, 9.0)}
    whole = gradients(make_settings(tiny_model, algo=algo), GROUPS)
    rows = gradients(make_settings(tiny_model, algo=algo, learner={"micro_batch_tokens": 1}), GROUPS)
    assert max(float(g.abs().max()) for g in whole.values()) > 1e-3
    assert largest_difference(whole, rows) < 1e-5


@pytest.mark.parametrize("reuse", [False, True])
def test_only_the_tokens_of_the_highest_entropy_are_trained(tiny_model: str, reuse: bool) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        entropy = torch.cat([-(p.exp() * p).sum(-1) for p in (row_scores(model, row) for row in collate(GROUPS).rows)])
    algo = {"top_entropy_share": 0.2, "policy_loss": "reinforce", "old_logprobs": "behaviour" if reuse else "recomputed"}
    expected = plain_gradients(tiny_model, entropy >= entropy.quantile(0.8))
    parts = [gradients(make_settings(tiny_model, algo=algo, learner={"micro_batch_tokens": budget}), GROUPS) for budget in (1, 1000)]
    assert largest_difference(*parts) < 1e-5
    assert reuse or largest_difference(parts[0], expected) < 1e-5


@pytest.mark.parametrize("preset", ["tis", "seq-tis", "icepop", "seq-mask-tis", "decoupled", "opsm", "m2po", "none"])
def test_no_correction_depends_on_micro_batches(tiny_model: str, preset: str) -> None:
    algo = {"off_policy": preset, "advantage_estimator": "reinforce"}
    whole = gradients(make_settings(tiny_model, algo=algo), GROUPS)
    rows = gradients(make_settings(tiny_model, algo=algo, learner={"micro_batch_tokens": 1}), GROUPS)
    assert largest_difference(whole, rows) < 1e-5


CORRECTIONS = """
import agentrl

@agentrl.off_policy_correction
def truncated(inputs, options):
    return inputs.ratio().clamp(max=2)

@agentrl.off_policy_correction(whole_batch=True)
def median(inputs, options):
    return inputs.ratio().where(inputs.log_rho <= inputs.log_rho.median(), 0.0)
"""


@pytest.mark.parametrize("name", ["truncated", "median"])
def test_a_correction_of_ones_own_sees_what_it_asks_for(tiny_model: str, tmp_path: Path, name: str) -> None:
    """Whole rows, or the whole batch before the first update."""
    file = tmp_path / "own.py"
    file.write_text(CORRECTIONS)
    algo = {"off_policy": f"{file}:{name}"}
    whole = gradients(make_settings(tiny_model, algo=algo), GROUPS)
    rows = gradients(make_settings(tiny_model, algo=algo, learner={"micro_batch_tokens": 1}), GROUPS)
    assert largest_difference(whole, rows) < 1e-5
    assert (largest_difference(whole, plain_gradients(tiny_model)) < 1e-5) == (name == "truncated")


def test_interpolated_old_logprobs_do_not_depend_on_micro_batches(tiny_model: str) -> None:
    """After the first update each pass has an estimate of its own; the weights after all of them agree."""
    from agentrl.learner.learner import LearnerRank

    def trained(**learner: object) -> dict[str, torch.Tensor]:
        algo = {"old_logprobs": "interpolated", "ppo_epochs": 2, "off_policy": "seq-mask-tis", "off_policy_range": (0.5, 2.0)}
        rank = LearnerRank(make_settings(tiny_model, algo=algo, learner={"learning_rate": 1e-3} | learner), CollectingSender())
        rank.start(0, 1, 0)
        metrics = rank.train(1, *GROUPS).metrics
        assert "time/old_logprobs_s" not in metrics
        assert metrics["staleness/fraction"] == 1.0
        weights = {name: tensor.detach().clone() for name, tensor in rank._started.named_weights()}
        rank.close()
        return weights

    assert largest_difference(trained(), trained(micro_batch_tokens=1)) < 1e-5


def test_packed_rows_give_the_gradient_of_padded_ones(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.learner.layout import Layout

    settings = make_settings(tiny_model, learner={"share_prompts": False})
    padded = gradients(settings, GROUPS)
    lay_out = Layout.micro_batch
    monkeypatch.setattr(Layout, "micro_batch", lambda self, bundles, packed: lay_out(self, bundles, packed=True))
    assert largest_difference(padded, gradients(settings, GROUPS)) < 1e-5


def test_order_of_groups_does_not_matter(tiny_model: str) -> None:
    assert largest_difference(gradients(make_settings(tiny_model), GROUPS), gradients(make_settings(tiny_model), GROUPS[::-1])) < 1e-5


@pytest.mark.parametrize("in_baseline", [True, False])
def test_truncated_episodes_give_no_gradient_of_their_own(tiny_model: str, in_baseline: bool) -> None:
    """From the formula: rewards of all, or of those that ended, in the baseline; the tokens of those that ended in the loss."""
    from transformers import AutoModelForCausalLM

    groups = tuple(replace(g, trajectories=(*g.trajectories[:2], replace(g.trajectories[2], status=Status.TRUNCATED))) for g in GROUPS[:3])
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    parts = []
    for group in groups:
        seen = np.array([t.reward for t in group.trajectories[: 3 if in_baseline else 2]], dtype=np.float64)
        for t in group.trajectories[:2]:
            batch = collate([replace(group, trajectories=(t,))])
            scores = torch.cat([row_scores(model, row) for row in batch.rows])
            new = scores.gather(-1, action_targets(batch)[:, None])[:, 0]
            advantage = (t.reward - seen.mean()) / seen.std(ddof=1)
            parts.append(-(new.detach() - batch.logprobs).exp().clamp(max=2.0) * advantage * new)
    torch.cat(parts).mean().backward()
    expected = {f"model.{name}": parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    algo = {"mask_truncated": True, "truncated_in_baseline": in_baseline}
    found = gradients(make_settings(tiny_model, algo=algo), groups)
    assert largest_difference(found, expected) < 1e-5
    assert largest_difference(found, gradients(make_settings(tiny_model, algo=algo, learner={"micro_batch_tokens": 1}), groups)) < 1e-5
    assert largest_difference(found, gradients(make_settings(tiny_model), groups)) > 1e-3


def test_a_failed_member_changes_no_other_group(tiny_model: str) -> None:
    from agentrl.core.types import Status

    failed = replace(GROUPS[0].trajectories[0], status=Status.ENV_ERROR, reward=None)
    crippled = replace(GROUPS[0], trajectories=(failed, *GROUPS[0].trajectories[1:]))
    left_out = replace(GROUPS[0], trajectories=GROUPS[0].trajectories[1:])
    settings = make_settings(tiny_model)
    assert largest_difference(gradients(settings, (crippled, *GROUPS[1:])), gradients(settings, (left_out, *GROUPS[1:]))) == 0.0


def test_old_from_the_same_pass_equals_old_computed_before(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.learner.policy_objective import PolicyObjective

    fused = gradients(make_settings(tiny_model), GROUPS)
    monkeypatch.setattr(PolicyObjective, "_old_scores_are_needed", lambda self, updates: True)
    assert largest_difference(fused, gradients(make_settings(tiny_model), GROUPS)) == 0.0


def test_chunked_scores_equal_whole_ones(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.learner import settings

    algo = {"entropy_coef": 0.1}
    whole = gradients(make_settings(tiny_model, algo=algo), GROUPS)
    monkeypatch.setattr(settings, "CHUNK_ELEMENTS", 256)
    monkeypatch.setattr(settings, "MIN_ROWS", 1)
    assert largest_difference(whole, gradients(make_settings(tiny_model, algo=algo), GROUPS)) < 1e-6


def test_gradient_checkpointing_changes_nothing(tiny_model: str) -> None:
    plain = gradients(make_settings(tiny_model), GROUPS)
    assert largest_difference(plain, gradients(make_settings(tiny_model, learner={"gradient_checkpointing": True}), GROUPS)) < 1e-6
