"""Rows with the same prompt go through the model as one sequence, where that is less work and the model allows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.core.types import Group, Task, Trajectory
from agentrl.learner.batch import Batch, collate
from agentrl.learner.layout import Layout, MicroBatch
from agentrl.learner.models import PolicyModel
from agentrl.learner.probes import can_share
from agentrl.learner.trees import share_prefixes
from tests.learner_support import gradients, largest_difference, make_groups, make_settings
from tests.unit.learner.test_algorithms import started
from tests.unit.learner.test_batch import trajectory, turn

CPU = torch.device("cpu")
SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


def batch_of(*members: Trajectory) -> Batch:
    return collate([Group(group_id=0, task=Task("x"), trajectories=members)])


def test_one_sequence_holds_the_prompt_once() -> None:
    batch = batch_of(trajectory(turn([1, 2, 3], [4, 5])), trajectory(turn([1, 2, 3], [6])), trajectory(turn([1, 2, 3], [7, 8, 9])))
    (bundle,) = share_prefixes(batch, budget=100, hidden_size=1000)
    assert (bundle.rows, bundle.shared, bundle.length) == ((0, 1, 2), (0, 3, 3), 6)
    micro = Layout(batch).micro_batch([bundle], packed=False)
    assert micro.input_ids.tolist() == [[1, 2, 3, 4, 7, 8]]
    assert micro.position_ids is not None
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 3, 4]]
    assert micro.targets.tolist() == [4, 5, 6, 7, 8, 9]
    assert micro.select.tolist() == [2, 3, 2, 2, 4, 5]
    assert (micro.num_tokens, micro.num_row_tokens) == (6, 4 + 3 + 5)
    assert micro.ends is not None
    assert micro.ends.tolist() == [[6, 6, 6, 4, 6, 6]]
    assert micro.inputs()["attention_mask"][0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 1, 0, 1, 1],
    ]


def test_other_prompts_other_groups_and_full_sequences_stay_apart() -> None:
    same, other, third = (
        trajectory(turn(prompt, answer)) for prompt, answer in (([1, 2, 3], [4, 5]), ([6, 2, 3], [4, 5]), ([1, 2, 3], [7, 8]))
    )
    groups = [Group(group_id=g, task=Task("x"), trajectories=(same, other, third)) for g in range(2)]
    found = share_prefixes(collate(groups), budget=100, hidden_size=1000)
    assert [bundle.rows for bundle in found] == [(0, 2), (1,), (3, 5), (4,)]
    assert [bundle.group for bundle in found] == [0, 0, 1, 1]
    fourth = trajectory(turn([1, 2, 3], [9, 4]))
    small = share_prefixes(batch_of(same, third, fourth), budget=5, hidden_size=1000)
    assert [bundle.rows for bundle in small] == [(0, 1), (2,)]


def test_long_answers_to_a_short_prompt_are_not_put_together() -> None:
    """Between tokens of two answers nothing is attended to, but a masked kernel computes it."""
    long, other = (trajectory(turn([1, 2], [token] * 500)) for token in (3, 4))
    assert [bundle.rows for bundle in share_prefixes(batch_of(long, other), budget=10**6, hidden_size=64)] == [(0,), (1,)]
    short, other = (trajectory(turn([1] * 500, [token] * 50)) for token in (3, 4))
    assert [bundle.rows for bundle in share_prefixes(batch_of(short, other), budget=10**6, hidden_size=64)] == [(0, 1)]


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_gradient_and_scores_are_those_of_rows_alone(tiny_model: str, mini_batches: int) -> None:
    groups = make_groups(4, 5, seed=3)
    algo = {"mini_batches": mini_batches, "init_kl_coef": 0.3, "advantage_estimator": "gae", "entropy_coef": 0.1}
    apart = gradients(make_settings(tiny_model, algo=algo, learner={"share_prompts": False}), groups)
    for stage in (0, 3):
        shared = gradients(make_settings(tiny_model, algo=algo, learner={"zero_stage": stage}), groups)
        assert largest_difference(apart, shared) < 1e-5


def test_metrics_say_how_much_was_shared(tiny_model: str) -> None:
    groups = make_groups(4, 5, seed=3)
    learner = started(tiny_model)
    metrics = learner.train(0, *groups).metrics
    learner.close()
    batch = collate(groups)
    saved = int(batch.input_lengths().sum()) - sum(b.length for b in share_prefixes(batch, budget=16384, hidden_size=32))
    assert metrics["shared_prompts"] == pytest.approx(saved / int(batch.input_lengths().sum()))
    assert metrics["shared_prompts"] > 0.1


@pytest.mark.parametrize("learner", [{"share_prompts": False}, {"attn_implementation": "eager"}])
def test_what_is_switched_off_is_not_shared(tiny_model: str, learner: dict[str, Any]) -> None:
    rank = started(tiny_model, learner=learner)
    metrics = rank.train(0, *make_groups(2, 3)).metrics
    rank.close()
    assert metrics["shared_prompts"] == 0.0


def scored(model: Any) -> bool:
    policy = PolicyModel(model.eval())

    def score(micro: MicroBatch) -> Tensor:
        logprobs: Tensor = policy(micro)[0]
        return logprobs

    return can_share(score, model.config, CPU, rounding=0.01)


def test_models_that_attend_to_everything_share() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    assert scored(LlamaForCausalLM(LlamaConfig(**SHAPE)))
    assert scored(Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_key_value_heads=1, head_dim=16)))
    assert scored(GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)))


def test_models_that_do_not_attend_to_everything_do_not() -> None:
    from transformers import (
        BloomConfig,
        BloomForCausalLM,
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        MambaConfig,
        MambaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
    )

    torch.manual_seed(0)
    assert not scored(MistralForCausalLM(MistralConfig(**SHAPE, num_key_value_heads=1, sliding_window=4096)))
    assert not scored(Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, num_key_value_heads=1, head_dim=16, sliding_window=16)))
    assert not scored(MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)))
    assert not scored(BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)))


def test_a_model_with_a_wrong_mask_is_found_out(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    policy = PolicyModel(LlamaForCausalLM(LlamaConfig(**SHAPE)).eval())

    def without_mask(micro: MicroBatch) -> Tensor:
        from dataclasses import replace

        logprobs: Tensor = policy(replace(micro, ends=None))[0]
        return logprobs

    assert not can_share(without_mask, policy.model.config, CPU, rounding=0.01)
