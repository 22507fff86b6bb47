"""KL control, critic, epochs and mini-batches, entropy, averages: the parts of an algorithm that the learner wires."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.core.errors import ConfigError
from agentrl.learner.batch import collate
from agentrl.learner.learner import LearnerRank
from tests.learner_support import (
    CollectingSender,
    action_targets,
    gradients,
    largest_difference,
    make_groups,
    make_settings,
    row_scores,
    write_experts,
)

GROUPS = make_groups(4, 3, seed=2)
STAGES = (0, 2, 3)


def started(model: str, **changes: Any) -> LearnerRank:
    learner = LearnerRank(make_settings(model, **changes), CollectingSender())
    learner.start(0, 1, 0)
    return learner


def weights(learner: LearnerRank) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner._started.named_weights()}


def logprobs(model_dir: str) -> tuple[Any, torch.Tensor]:
    """A plain model and its log-probabilities of the action tokens of `GROUPS`, with gradient."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    batch = collate(GROUPS)
    return model, torch.cat([row_scores(model, row) for row in batch.rows])


# KL


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("in_loss", [False, True])
def test_the_reference_is_the_initial_policy(tiny_model: str, stage: int, in_loss: bool) -> None:
    algo = {"init_kl_coef": 0.1, "use_kl_loss": in_loss, "kl_estimator": "k3"}
    learner = started(tiny_model, learner={"zero_stage": stage}, algo=algo)
    divergences = [learner.train(step, *GROUPS).metrics["kl/reference"] for step in range(3)]
    learner.close()
    assert divergences[0] == pytest.approx(0.0, abs=1e-6)
    assert divergences[2] > 1e-3


def test_without_a_coefficient_there_is_no_reference(tiny_model: str) -> None:
    learner = started(tiny_model)
    assert learner._started.models.reference is None
    assert "kl/reference" not in learner.train(0, *GROUPS).metrics
    learner.close()


@pytest.mark.parametrize("unbiased", [False, True])
def test_kl_in_the_loss_has_the_gradient_of_the_formula(tiny_model: str, unbiased: bool) -> None:
    """Against a reference with other weights, k2 in the loss: half the mean squared log ratio, weighted as the loss of the policy."""
    from agentrl.learner.state import LearnerState

    algo = {"init_kl_coef": 0.7, "use_kl_loss": True, "kl_estimator": "k2", "kl_bias_correction": unbiased}
    shift = 0.01
    original = LearnerState.train

    def train_with_moved_reference(self: LearnerState, step: int, groups: Any) -> dict[str, float]:
        with torch.no_grad():
            for parameter in self.models.reference.parameters():  # type: ignore[union-attr]
                parameter.mul_(1.0 + shift)
        return original(self, step, groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LearnerState, "train", train_with_moved_reference)
        found = gradients(make_settings(tiny_model, algo=algo), GROUPS)
    plain = gradients(make_settings(tiny_model), GROUPS)
    model, scores = logprobs(tiny_model)
    batch = collate(GROUPS)
    targets = action_targets(batch)[:, None]
    moved = logprobs(tiny_model)
    with torch.no_grad():
        for parameter in moved[0].parameters():
            parameter.mul_(1.0 + shift)
    from transformers import AutoModelForCausalLM

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: moved[0])
        reference = logprobs(tiny_model)[1].gather(-1, targets)
    new = scores.gather(-1, targets)[:, 0]
    weights = (new.detach() - batch.logprobs).exp().clamp(max=2.0)
    assert weights.std() > 0.01
    ratio = (new - new.detach()).exp() if unbiased else 1.0
    (0.7 * 0.5 * (weights * ratio * (new - reference[:, 0]).square()).mean()).backward()
    expected = {f"model.{name}": parameter.grad + plain[f"model.{name}"] for name, parameter in model.named_parameters()}
    assert largest_difference(found, expected) < 1e-5


def test_the_share_of_clipped_rewards_is_reported(tiny_model: str) -> None:
    rewards = sorted(trajectory.reward or 0.0 for group in GROUPS for trajectory in group.trajectories)
    learner = started(tiny_model, algo={"reward_clip_range": (-100.0, (rewards[-2] + rewards[-1]) / 2)})
    assert learner.train(0, *GROUPS).metrics["reward/clipped"] == pytest.approx(1 / len(rewards))
    learner.close()


def test_kl_in_the_reward_is_paid_by_the_token_and_those_before(tiny_model: str) -> None:
    learner = started(tiny_model, algo={"init_kl_coef": 5.0, "kl_estimator": "k2"})
    first = learner.train(0, *GROUPS).metrics
    second = learner.train(1, *GROUPS).metrics
    learner.close()
    assert second["kl/reference"] > 1e-3
    assert second["advantage/mean"] < first["advantage/mean"] - 5.0 * second["kl/reference"]


def test_the_coefficient_follows_the_target(tiny_model: str) -> None:
    learner = started(tiny_model, algo={"init_kl_coef": 0.1, "kl_target": 1e-6, "kl_estimator": "k3"})
    coefficients = [learner.train(step, *GROUPS).metrics["kl/coefficient"] for step in range(3)]
    learner.close()
    down, up = (1 + error * 12 / 10_000 for error in (-0.2, 0.2))  # a step has 12 episodes
    assert coefficients == pytest.approx([0.1, 0.1 * down, 0.1 * down * up], rel=1e-9)


@pytest.mark.parametrize("stage", STAGES)
def test_the_reference_is_reset(tiny_model: str, stage: int) -> None:
    algo = {"init_kl_coef": 0.1, "ref_reset_every": 2, "kl_estimator": "k3"}
    learner = started(tiny_model, learner={"zero_stage": stage}, algo=algo)
    divergences = [learner.train(step, *GROUPS).metrics["kl/reference"] for step in range(4)]
    learner.close()
    assert divergences[1] > 1e-4
    assert divergences[2] == pytest.approx(0.0, abs=1e-6)
    assert divergences[3] > 1e-4


# Entropy


def test_the_entropy_bonus_has_the_gradient_of_the_formula(tiny_model: str) -> None:
    found = gradients(make_settings(tiny_model, algo={"entropy_coef": 0.3}), GROUPS)
    plain = gradients(make_settings(tiny_model), GROUPS)
    model, scores = logprobs(tiny_model)
    (0.3 * (scores.exp() * scores).sum(-1).mean()).backward()
    expected = {f"model.{name}": parameter.grad + plain[f"model.{name}"] for name, parameter in model.named_parameters()}
    assert largest_difference(found, expected) < 1e-5


def test_the_entropy_bonus_follows_its_target(tiny_model: str) -> None:
    """Written out: 0.005 more after each step below the target, which is all of them; then 0 at once above it."""
    learner = started(tiny_model, algo={"entropy_target": 100.0})
    found = [learner.train(step, *GROUPS).metrics for step in range(3)]
    learner.close()
    assert [m["entropy/coefficient"] for m in found] == pytest.approx([0.0, 0.005, 0.01])
    assert "loss/entropy" not in found[0]
    assert found[2]["loss/entropy"] == pytest.approx(-0.01 * found[2]["entropy"], rel=1e-5)
    learner = started(tiny_model, algo={"entropy_coef": 0.5, "entropy_target": 1e-3})
    assert [learner.train(step, *GROUPS).metrics["entropy/coefficient"] for step in range(2)] == [0.5, 0.0]
    assert learner._started.entropy.coefficient == pytest.approx(0.49)
    learner.close()


# Epochs and mini-batches


@pytest.mark.parametrize("stage", STAGES)
def test_the_ratio_is_anchored_to_the_weights_before_the_first_update(tiny_model: str, stage: int) -> None:
    learner = started(tiny_model, learner={"zero_stage": stage}, algo={"ppo_epochs": 3, "mini_batches": 2, "off_policy": "none"})
    metrics = learner.train(0, *GROUPS).metrics
    learner.close()
    assert metrics["skipped_updates"] == 0.0
    assert metrics["policy/kl"] > 1e-4
    assert metrics["policy/clip_fraction"] > 0.0
    assert metrics["rho/mean"] > 0.0


def test_updates_equal_those_written_out(tiny_model: str) -> None:
    """Two epochs of two mini-batches, against a plain loop with torch's AdamW."""
    from transformers import AutoModelForCausalLM

    from agentrl.learner.sharding import plan_updates
    from agentrl.learner.trees import share_prefixes

    algo = {"ppo_epochs": 2, "mini_batches": 2, "off_policy": "none", "advantage_estimator": "rloo"}
    learner = started(tiny_model, algo=algo)
    learner.train(0, *GROUPS)
    trained = weights(learner)
    learner.close()

    batch = collate(GROUPS)
    bundles = share_prefixes(batch, budget=10**6, hidden_size=32)
    lengths, group = [b.length for b in bundles], [b.group for b in bundles]
    plans = plan_updates(lengths, group, updates=2, ranks=1, budget=10**6, packed=False, hidden_size=32)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    n = 3.0
    totals = torch.zeros(batch.num_groups).index_add(0, batch.group, batch.rewards)
    advantages = ((n * batch.rewards - totals[batch.group]) / (n - 1.0))[batch.episode]

    def score(row: int) -> tuple[torch.Tensor, torch.Tensor]:
        mine = (batch.row == row).nonzero()[:, 0]
        return mine, row_scores(model, batch.rows[row]).gather(-1, action_targets(batch)[mine][:, None])[:, 0]

    with torch.no_grad():
        old = torch.cat([score(row)[1] for row in range(batch.num_rows)])
    for _ in range(2):
        for plan in plans:
            parts = [score(row) for place in plan.rows for row in bundles[place].rows]
            at, new = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
            ratio = (new - old[at]).exp()
            loss = torch.maximum(-ratio * advantages[at], -ratio.clamp(0.8, 1.2) * advantages[at]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert largest_difference(trained, dict(model.named_parameters())) < 2e-3
    assert largest_difference(trained, dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters())) > 2e-2


def test_reused_behaviour_logprobs_take_the_place_of_old(tiny_model: str) -> None:
    learner = started(tiny_model, algo={"old_logprobs": "behaviour"})
    metrics = learner.train(0, *GROUPS).metrics
    learner.close()
    assert metrics["rho/mean"] == metrics["rho/max"] == 1.0
    assert metrics["policy/ratio_max"] > 1.5
    assert "time/old_logprobs_s" not in metrics


# Critic


@pytest.mark.parametrize("stage", STAGES)
def test_the_critic_learns_while_the_policy_is_frozen(tiny_model: str, stage: int) -> None:
    learner_config = {"zero_stage": stage, "critic_warmup_steps": 8, "critic_learning_rate": 3e-3, "value_clip": None}
    learner = started(tiny_model, learner=learner_config, algo={"advantage_estimator": "gae"})
    before = weights(learner)
    errors = []
    for step in range(8):
        metrics = learner.train(step, *GROUPS).metrics
        errors.append(metrics["value/error"])
    assert "rho/mean" in metrics
    assert "grad_norm" not in metrics
    assert metrics["critic/grad_norm"] > 0.0
    assert largest_difference(before, weights(learner)) == 0.0
    assert errors[-1] < 0.7 * errors[0]
    assert learner.train(8, *GROUPS).metrics["grad_norm"] > 0.0
    assert largest_difference(before, weights(learner)) > 0.0
    learner.close()


def test_the_first_values_are_zero(tiny_model: str) -> None:
    learner = started(tiny_model, algo={"advantage_estimator": "gae"})
    metrics = learner.train(0, *GROUPS).metrics
    learner.close()
    assert metrics["value/mean"] == 0.0


def test_the_critics_gradient_does_not_depend_on_layout(tiny_model: str) -> None:
    algo = {"advantage_estimator": "gae"}

    def critic_gradients(**learner: Any) -> dict[str, torch.Tensor]:
        settings = make_settings(tiny_model, learner={"critic_warmup_steps": 9} | learner, algo=algo)
        return gradients(settings, GROUPS)

    whole = critic_gradients()
    assert float(whole["head.weight"].abs().max()) > 1e-2
    for stage in (0, 1, 2, 3):
        assert largest_difference(whole, critic_gradients(zero_stage=stage, micro_batch_tokens=1)) < 1e-5


def test_other_estimators_load_no_critic(tiny_model: str) -> None:
    learner = started(tiny_model)
    assert learner._started.models.critic is None
    learner.close()


def test_the_policys_schedule_starts_after_the_warm_up_of_the_critic(tiny_model: str) -> None:
    learner_config = {"critic_warmup_steps": 2, "lr_warmup_steps": 4}
    learner = started(tiny_model, learner=learner_config, algo={"advantage_estimator": "gae"})
    found = [learner.train(step, *GROUPS).metrics for step in range(4)]
    learner.close()
    assert [m["critic/learning_rate"] for m in found] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])
    assert [m["learning_rate"] for m in found[2:]] == pytest.approx([2.5e-3, 5e-3])


# Average of the weights


@pytest.mark.parametrize("stage", STAGES)
def test_the_moving_average_is_kept_and_saved(tiny_model: str, tmp_path: Path, stage: int) -> None:
    from transformers import AutoModelForCausalLM

    learner = started(tiny_model, learner={"zero_stage": stage, "ema_decay": 0.75})
    expected = weights(learner)
    for step in range(3):
        learner.train(step, *GROUPS)
        expected = {name: 0.75 * value + 0.25 * weights(learner)[name] for name, value in expected.items()}
    learner.save_model(str(tmp_path / "model"))
    now = weights(learner)
    learner.close()
    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model-ema").named_parameters())
    assert largest_difference(saved, expected) < 1e-6
    assert largest_difference(saved, now) > 1e-3


# Mixtures of experts


@pytest.fixture(scope="module")
def experts_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_experts(tmp_path_factory.mktemp("experts"))


def test_the_load_balancing_loss_is_that_of_transformers(experts_model: str) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    found = gradients(make_settings(experts_model, algo={"aux_loss_coef": 0.5}, learner={"micro_batch_tokens": 1}), GROUPS)
    plain = gradients(make_settings(experts_model), GROUPS)
    model: Any = AutoModelForCausalLM.from_pretrained(experts_model, dtype=torch.float32)
    batch = collate(GROUPS)
    rows = [torch.from_numpy(row.tokens[:-1].astype("int64")) for row in batch.rows]
    per_row = [model(input_ids=row[None], output_router_logits=True).router_logits for row in rows]
    layers = tuple(torch.cat(layer) for layer in zip(*per_row, strict=True))
    (0.5 * load_balancing_loss_func(layers, 4, 2)).backward()
    zero = torch.zeros(())
    expected = {
        f"model.{name}": plain[f"model.{name}"] + (zero if parameter.grad is None else parameter.grad)
        for name, parameter in model.named_parameters()
    }
    router = "model.model.layers.0.mlp.gate.weight"
    assert float((found[router] - plain[router]).abs().max()) > 1e-3
    assert largest_difference(found, expected) < 1e-5


def test_experts_are_published_under_their_checkpoint_names(experts_model: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    learner = started(experts_model)
    learner.train(0, *GROUPS)
    learner.save_model(str(tmp_path / "model"))
    published = weights(learner)
    learner.close()
    assert largest_difference(published, load_file(tmp_path / "model" / "model.safetensors")) == 0.0
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in published


def test_balancing_a_dense_model_is_refused(tiny_model: str) -> None:
    learner = LearnerRank(make_settings(tiny_model, algo={"aux_loss_coef": 0.1}), CollectingSender())
    with pytest.raises(ConfigError, match="--aux-loss-coef"):
        learner.start(0, 1, 0)


def test_a_model_that_scales_its_logits_is_scored_with_the_scale(tiny_model: str, tmp_path: Path) -> None:
    """Only the input of the output layer is narrowed, so whatever the model does to logits still happens."""
    from transformers import AutoTokenizer, CohereConfig, CohereForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = CohereConfig(vocab_size=64, logit_scale=0.37, initializer_range=0.3, **shape)
    CohereForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    learner = started(str(tmp_path), algo={"mini_batches": 2})
    batch = collate(GROUPS)
    state = learner._started
    from agentrl.learner.layout import Layout
    from agentrl.learner.trees import one_row_bundles

    micro = Layout(batch).micro_batch(one_row_bundles(batch), packed=False)
    with torch.no_grad():
        found = state.models.policy(micro)[0]
        expected = logprobs(str(tmp_path))[1].gather(-1, action_targets(batch)[:, None])[:, 0]
    learner.close()
    assert torch.allclose(found[torch.argsort(micro.actions)], expected, atol=1e-5)
