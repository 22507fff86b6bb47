"""Rows of a data set as the learner takes them, and the settings of the learner that a run has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl.assets import tiny_model_path
from agentrl.config.methods import METHODS
from agentrl.resolve.tune import load_given
from agentrl.tune.learner_rows import RowMaker, learner_settings
from agentrl.tune.loop import save_model
from agentrl.tune.row_text import IGNORED
from tests.learner_support import write_experts
from tests.unit.tune.plans import rows_of, state_of

DATA = Path(__file__).parents[3] / "examples" / "tune"


def plan(command: str = "sft", data: str = "chats", **settings: Any) -> Any:
    return load_given(METHODS[command], {"data": str(DATA / f"{data}.jsonl"), **settings})


def read(made: Any) -> list[tuple[list[int], list[int]]]:
    return [(row.tokens.tolist(), row.reads.tolist()) for row in made.rows]


def test_the_place_before_each_label_is_read() -> None:
    """Nothing predicts the first token of a row, and a row without another label is left out."""
    rows = [{"input_ids": [1, 2, 3], "labels": [IGNORED, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}, {"input_ids": [6], "labels": [6]}]
    made = RowMaker("sft")(rows)
    assert read(made) == [([1, 2, 3], [0, 1]), ([4, 5], [0])]
    assert made.row.tolist() == [0, 0, 1]
    assert (made.paired, made.labels, made.companions) == (False, None, None)


def test_a_step_is_read_at_its_own_end() -> None:
    rows = [{"input_ids": [1, 2, 3], "labels": [IGNORED, IGNORED, 0.25]}, {"input_ids": [4, 5, 6], "labels": [IGNORED, 1, 0]}]
    made = RowMaker("process-reward-model")(rows)
    assert read(made) == [([1, 2, 3], [2]), ([4, 5, 6], [1, 2])]
    assert made.labels is not None
    assert made.labels.tolist() == [0.25, 1.0, 0.0]


def test_a_rejected_answer_follows_the_chosen_one_and_a_missing_margin_is_zero() -> None:
    rows = [
        {"prompt_ids": [1], "chosen_ids": [2, 3], "rejected_ids": [4], "margin": 2.0},
        {"prompt_ids": [5, 6], "chosen_ids": [7], "rejected_ids": [8]},
    ]
    made = RowMaker("dpo")(rows)
    assert read(made) == [([1, 2, 3], [0, 1]), ([1, 4], [0]), ([5, 6, 7], [1]), ([5, 6, 8], [1])]
    assert made.paired
    assert made.columns["margin"].tolist() == [2.0, 2.0, 0.0, 0.0]


def test_a_reward_is_read_at_the_end_of_its_row() -> None:
    rows = [{"prompt_ids": [1], "chosen_ids": [2, 3], "rejected_ids": [4]}]
    assert read(RowMaker("reward-model")(rows)) == [([1, 2, 3], [2]), ([1, 4], [1])]


def test_a_labelled_answer_comes_again_behind_the_next_prompt() -> None:
    rows = [{"prompt_ids": [number], "completion_ids": [10 + number], "label": number > 1} for number in (1, 2, 3)]
    made = RowMaker("kto")(rows)
    assert read(made) == [([1, 11], [0]), ([2, 12], [0]), ([3, 13], [0])]
    assert read(made.companions) == [([1, 13], [0]), ([2, 11], [0]), ([3, 12], [0])]
    assert made.columns["desirable"].tolist() == [False, True, True]


def test_an_answer_without_a_prompt_is_trained_from_its_second_token() -> None:
    rows = [{"prompt_ids": [], "completion_ids": [7, 8, 9], "label": True}]
    assert read(RowMaker("kto")(rows)) == [([7, 8, 9], [0, 1])]


def test_the_settings_of_the_learner_follow_from_those_of_the_run() -> None:
    settings: dict[str, Any] = {"lr_warmup_steps": 5, "max_grad_norm": 0.5, "seed": 3, "adam_betas": (0.9, 0.8), "lr_schedule": "linear"}
    found = learner_settings(plan(**settings, micro_batch_tokens=400, learning_rate=0.1), 7)
    learner = found.learner
    assert (learner.lr_warmup_steps, learner.max_grad_norm, learner.adam_betas, learner.lr_schedule) == (5, 0.5, (0.9, 0.8), "linear")
    assert (learner.learning_rate, learner.optimizer, learner.micro_batch_tokens, learner.train_vision) == (0.1, "adamw", 400, True)
    assert (learner.learner_backend, learner.zero_stage, found.dtype) == ("torch", 0, "float32")
    assert (found.seed, found.num_steps, found.model) == (3, 7, str(tiny_model_path()))
    assert found.objective is not None
    assert (found.objective.name, found.objective.task, found.objective.packs) == ("sft", "CAUSAL_LM", True)


@pytest.mark.parametrize(
    ("change", "dtype"), [({"zero_stage": 2}, "float32"), ({"num_ranks": 2}, "float32"), ({"dtype": "bfloat16"}, "bfloat16")]
)
def test_deepspeed_trains_where_pytorch_alone_does_not(change: dict[str, Any], dtype: str) -> None:
    found = learner_settings(plan(**change), 1)
    assert (found.learner.learner_backend, found.dtype) == ("deepspeed", dtype)


def test_the_models_of_an_objective_are_those_of_the_settings(tmp_path: Path) -> None:
    pairs = learner_settings(plan("dpo", "pairs", reference="other"), 1).objective
    taught = learner_settings(plan("distill", teacher="wise"), 1).objective
    judge = learner_settings(plan("reward-model", "helpful"), 1).objective
    assert pairs is not None
    assert taught is not None
    assert judge is not None
    assert (pairs.reference, pairs.teacher, pairs.packs) == ("other", "", False)
    assert (taught.reference, taught.teacher) == ("", "wise")
    assert (judge.name, judge.task) == ("reward-model", "SEQ_CLS")


def test_a_moving_average_of_the_weights_is_saved_beside_the_model(tmp_path: Path) -> None:
    run = plan(ema_decay=0.25, learning_rate=0.01, lr_schedule="constant", run_dir=str(tmp_path))
    state, rows = state_of(run), rows_of(run).parts[0][:4]
    name, _ = next(state.policy.named_parameters())
    seen = [state.policy.get_parameter(name).detach().clone()]
    for step in range(2):
        state.train_rows(step, RowMaker("sft")(rows))
        seen.append(state.policy.get_parameter(name).detach().clone())
    save_model(state, tmp_path / "model")
    saved = {part: load_file(tmp_path / part / "model.safetensors")[name] for part in ("model", "model-ema")}
    expected = 0.25 * (0.25 * seen[0] + 0.75 * seen[1]) + 0.75 * seen[2]
    torch.testing.assert_close(saved["model-ema"], expected)
    assert torch.equal(saved["model"], seen[2])
    assert float((expected - seen[2]).abs().max()) > 1e-4


def test_experts_are_balanced_as_the_model_asks(tmp_path: Path) -> None:
    model = write_experts(tmp_path / "experts", router_aux_loss_coef=0.25)
    assert learner_settings(plan(model=model), 1).algo.aux_loss_coef == 0.25
    assert learner_settings(plan(), 1).algo.aux_loss_coef == 0.0
