from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.algo.token_losses import shares
from agentrl.core.errors import BatchError, CheckpointError, LearnerError, NonFiniteError
from agentrl.core.types import Group, Status, Task, Trajectory
from agentrl.learner.learner import LearnerRank
from tests.faults.report import Saw
from tests.learner_support import CollectingSender, largest_difference, make_groups, make_settings


def started(model: str, **changes: Any) -> LearnerRank:
    learner = LearnerRank(make_settings(model, **changes), CollectingSender())
    learner.start(0, 1, 0)
    return learner


def weights(learner: LearnerRank) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner._started.named_weights()}


def optimizer_state(learner: LearnerRank) -> list[torch.Tensor]:
    optimizer = learner._started.models.policy.engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    return [value.detach().clone() for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]


def train(model: str, steps: int = 3, **changes: Any) -> dict[str, torch.Tensor]:
    learner = started(model, **changes)
    for step in range(steps):
        learner.train(step, *make_groups(seed=step, version=step))
    found = weights(learner)
    learner.close()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_zero_stage_trains_the_same_weights(tiny_model: str, stage: int) -> None:
    clipped = {"max_grad_norm": 0.5, "weight_decay": 0.1}
    plain = train(tiny_model, learner=clipped)
    # Adam divides tiny gradients by their own size, so rounding shows up enlarged in a few weights.
    assert largest_difference(plain, train(tiny_model, learner={"zero_stage": stage, **clipped})) < 1e-4


def test_gradients_of_micro_batches_are_not_summed_in_bfloat16(tiny_model: str) -> None:
    """DeepSpeed would do so without ZeRO; its first stage sums them in float32."""
    learners = [{"zero_stage": stage, "learner_dtype": "bfloat16", "micro_batch_tokens": 1} for stage in (0, 1)]
    assert [make_settings(tiny_model, learner=learner).learner.zero_stage for learner in learners] == [1, 1]
    assert make_settings(tiny_model, learner={"zero_stage": 0}).learner.zero_stage == 0
    without, first = (train(tiny_model, learner=learner) for learner in learners)
    assert largest_difference(without, first) == 0.0


def test_the_same_input_gives_the_same_bits(tiny_model: str) -> None:
    assert largest_difference(train(tiny_model), train(tiny_model)) == 0.0


def test_training_raises_the_probability_of_what_was_rewarded(tiny_model: str) -> None:
    learner = started(tiny_model, algo={"off_policy": "none", "policy_loss": "reinforce"})
    groups = make_groups(4, 4)
    losses = [learner.train(0, *groups).metrics["loss/policy"] for _ in range(2)]
    learner.close()
    assert losses[1] < losses[0]


def spoil_losses(patch: pytest.MonkeyPatch, factor: float) -> None:
    """Multiply the policy's loss, and with it every gradient."""
    patch.setattr("agentrl.learner.policy_objective.shares", lambda *args, **kwargs: shares(*args, **kwargs) * factor)


@pytest.mark.row(11, "a gradient of NaN, ZeRO stage {stage}, {dtype}")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_changes_nothing(
    tiny_model: str, stage: int, dtype: str, monkeypatch: pytest.MonkeyPatch, saw: Saw
) -> None:
    learner = started(tiny_model, learner={"zero_stage": stage, "learner_dtype": dtype})
    learner.train(0, *make_groups())
    before, state = weights(learner), optimizer_state(learner)
    spoil_losses(monkeypatch, float("nan"))
    metrics = learner.train(1, *make_groups()).metrics
    assert metrics["skipped_updates"] == 1.0
    assert "grad_norm" not in metrics
    assert largest_difference(before, weights(learner)) == 0.0
    assert all(torch.equal(a, b) for a, b in zip(state, optimizer_state(learner), strict=True))
    monkeypatch.undo()
    healthy = learner.train(2, *make_groups()).metrics
    learner.close()
    assert healthy["skipped_updates"] == 0.0
    assert healthy["grad_norm"] > 0.0
    saw(f"weights and the {len(state)} tensors of the optimizer bit for bit as before, the step counted as skipped, the next one fine")


def test_training_after_a_skip_is_as_if_there_had_been_none(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for broken in (False, True):
        learner = started(tiny_model, learner={"zero_stage": 2})
        learner.train(0, *make_groups())
        if broken:
            with monkeypatch.context() as patch:
                spoil_losses(patch, float("inf"))
                learner.train(1, *make_groups())
        learner.train(1, *make_groups(seed=5))
        found.append(weights(learner))
        learner.close()
    assert largest_difference(*found) == 0.0


@pytest.mark.row(11, "a gradient of NaN in every step")
def test_several_in_a_row_stop_the_run(tiny_model: str, monkeypatch: pytest.MonkeyPatch, saw: Saw) -> None:
    learner = started(tiny_model)
    spoil_losses(monkeypatch, float("nan"))
    learner.train(0, *make_groups())
    learner.train(1, *make_groups())
    with pytest.raises(NonFiniteError, match="was not finite for 3 updates in a row"):
        learner.train(2, *make_groups())
    learner.close()
    saw("NonFiniteError in the third step")


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_the_saved_model_loads_and_computes_the_same(tiny_model: str, untied_model: Path, tmp_path: Path, stage: int, tied: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    learner = started(tiny_model if tied else str(untied_model), learner={"zero_stage": stage})
    learner.train(0, *make_groups())
    learner.save_model(str(tmp_path / "model"))
    learner.save_model(str(tmp_path / "model"))
    published = weights(learner)
    learner.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    saved = dict(model.named_parameters())
    assert saved.keys() == published.keys()
    assert all(torch.equal(saved[name], published[name]) for name in saved)
    assert model.dtype == torch.float32
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert AutoTokenizer.from_pretrained(tmp_path / "model").convert_tokens_to_ids("w7") == 7
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_saving_where_one_cannot_write_is_a_clear_error(tiny_model: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    learner = started(tiny_model)
    with pytest.raises(CheckpointError, match="cannot be written"):
        learner.save_model(str(tmp_path / "file" / "model"))
    learner.close()


def test_publication_goes_through_the_sender(tiny_model: str) -> None:
    sender = CollectingSender()
    learner = LearnerRank(make_settings(tiny_model, learner={"zero_stage": 3}), sender)
    learner.start(0, 1, 0)
    update = learner.export_weights(4)
    assert update is not None
    assert update.version == 4
    assert largest_difference(sender.weights, weights(learner)) == 0.0
    learner.close()
    learner.close()
    with pytest.raises(LearnerError, match="start"):
        learner.export_weights(5)


def test_metrics_say_how_old_the_tokens_are(tiny_model: str) -> None:
    learner = started(tiny_model)
    old, new = make_groups(2, version=3), make_groups(2, seed=1, version=5)
    result = learner.train(5, *old, *new)
    learner.close()
    metrics = result.metrics
    tokens = [sum(t.num_tokens for g in groups for t in g.trajectories) for groups in (old, new)]
    assert metrics["staleness/max"] == 2.0
    assert metrics["staleness/mean"] == pytest.approx(2.0 * tokens[0] / sum(tokens))
    assert metrics["staleness/share_2"] == pytest.approx(tokens[0] / sum(tokens))
    assert metrics["tokens/trained"] == sum(tokens)
    assert metrics["staleness/fraction"] == pytest.approx(tokens[0] / sum(tokens))
    assert 0.0 < metrics["padding"] < 1.0
    assert result.seconds >= metrics["time/forward_backward_s"] > 0.0
    assert all(isinstance(value, float) for value in metrics.values())


def test_nothing_to_train_on_is_an_error(tiny_model: str) -> None:
    failed = Trajectory(trajectory_id="t", episode_id="t", group_id=0, turns=(), status=Status.ENV_ERROR)
    learner = started(tiny_model)
    with pytest.raises(BatchError):
        learner.train(0, Group(group_id=0, task=Task("x"), trajectories=(failed,)))
    learner.close()


def test_settings_pickle_and_need_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, agentrl.learner.learner; sys.exit(bool({'torch', 'deepspeed', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
    settings = make_settings("somewhere")
    assert pickle.loads(pickle.dumps(settings)) == settings
