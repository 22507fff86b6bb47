"""Every layout of the same rows gives the same scores and gradients, also where layers carry a state along the sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from agentrl.core.errors import ConfigError
from agentrl.learner.attention import (
    BLOCK,
    KERNELS,
    Costs,
    _reference,
    _varlen_on_gpu,
    choose_kernel,
    expanded,
    register,
    separate_rows,
    tree_mask,
)
from agentrl.learner.deepspeed.loading import tile_mlps
from agentrl.learner.layout import Layout, MicroBatch, _dense_mask
from agentrl.learner.models import PolicyModel
from agentrl.learner.plan import LearnerConfig
from agentrl.learner.probes import can_pack, can_share
from agentrl.learner.trees import one_row_bundles, share_prefixes
from tests.learner_support import gradients, largest_difference, make_groups, make_settings, write_model
from tests.unit.learner.test_batch import trajectory, turn
from tests.unit.learner.test_bundles import SHAPE, batch_of

CPU = torch.device("cpu")
GROUPS = make_groups(4, 4, seed=3)
SMALL = SHAPE | {"num_key_value_heads": 1, "initializer_range": 0.3}
LINEAR = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def tiny(name: str, **options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    return getattr(transformers, f"{name}ForCausalLM")(config(**SMALL | options)).eval()


def hybrid(name: str) -> Any:
    kinds = ["linear_attention", "full_attention"]
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    return tiny(name, head_dim=16, layer_types=kinds, initializer_range=0.1, **LINEAR, **(experts if name == "Qwen3Next" else {}))


def scorer(model: Any) -> Any:
    policy = PolicyModel(model)
    return lambda micro: policy(micro)[0]


def with_varlen(model: Any) -> Any:
    register("varlen")
    model.set_attn_implementation(KERNELS["varlen"].implementation)
    return model


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_all_layouts_are_equal(tiny_model: str, stage: int, checkpointing: bool) -> None:
    algo = {"init_kl_coef": 0.3, "advantage_estimator": "gae", "entropy_coef": 0.1} if stage == 2 else {"entropy_coef": 0.1}
    padded = gradients(make_settings(tiny_model, algo=algo, learner={"share_prompts": False}), GROUPS)
    learner = {"zero_stage": stage, "gradient_checkpointing": checkpointing, "micro_batch_tokens": 120, "attn_implementation": "varlen"}
    for share in (False, True):
        found = gradients(make_settings(tiny_model, algo=algo, learner=learner | {"share_prompts": share}), GROUPS)
        assert largest_difference(padded, found) < 1e-5


@pytest.mark.parametrize("name", ["Qwen3Next", "Qwen3_5"])
def test_packed_rows_of_a_hybrid_model_do_not_see_each_other(name: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")  # for its tokenizer
    hybrid(name).save_pretrained(path)
    settings = [make_settings(path, learner={"attn_implementation": kernel}) for kernel in ("sdpa", "varlen")]
    assert largest_difference(*(gradients(each, GROUPS) for each in settings)) < 1e-5


@pytest.mark.parametrize(
    "model",
    [
        lambda: tiny("Llama"),
        lambda: tiny("Qwen3", head_dim=16),
        lambda: tiny("Mistral", sliding_window=4),
        lambda: tiny("Gemma3", head_dim=16, sliding_window=4),
    ],
    ids=["llama", "qwen3", "window", "windows in some layers"],
)
def test_models_that_keep_packed_rows_apart_are_packed(model: Any) -> None:
    found = with_varlen(model())
    assert can_pack(scorer(found), found.config, CPU, rounding=1e-4)


@pytest.mark.parametrize("name", ["Qwen3Next", "Qwen3_5"])
def test_layers_that_carry_a_state_take_rows_one_beside_the_other(name: str) -> None:
    """Here the kernels of flash-linear-attention, which begin anew at every row, are not installed."""
    model = with_varlen(hybrid(name))
    assert not can_pack(scorer(model), model.config, CPU, rounding=0.25)
    assert separate_rows(model)
    assert can_pack(scorer(model), model.config, CPU, rounding=1e-4)
    assert not separate_rows(tiny("Llama"))


def test_models_that_mix_packed_rows_up_are_not_packed(tmp_path: Path) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)).eval()
    capped = tiny("Gemma2", head_dim=16)
    for model in (bloom, capped):
        with_varlen(model)
        assert not can_pack(scorer(model), model.config, CPU, rounding=0.01)
    path = write_model(tmp_path / "model")
    capped.save_pretrained(path)
    with pytest.raises(ConfigError, match="--attn-implementation"):
        gradients(make_settings(path, learner={"attn_implementation": "varlen"}), GROUPS)


def test_models_share_tokens_in_packed_rows() -> None:
    llama, windowed = with_varlen(tiny("Llama")), with_varlen(tiny("Mistral", sliding_window=4))
    assert can_share(scorer(llama), llama.config, CPU, packed=True, rounding=1e-4)
    assert not can_share(scorer(windowed), windowed.config, CPU, packed=True, rounding=0.01)


def walked(generator: torch.Generator, count: int) -> Tensor:
    """Who sees whom in `count` random trees that follow each other, of segments that are longer and shorter than blocks."""
    parents: list[int] = []
    line: list[int] = []
    for _ in range(count):
        line = []
        for _ in range(int(torch.randint(1, 9, (1,), generator=generator))):
            # A segment goes on from the one before it or from an ancestor of it, so that a walk comes by in this order.
            line = line[: int(torch.randint(1, len(line) + 1, (1,), generator=generator))] if line else []
            parents.append(line[-1] if line else -1)
            line.append(len(parents) - 1)
    above = torch.eye(len(parents), dtype=torch.bool)
    for number, parent in enumerate(parents):
        if parent >= 0:
            above[number] |= above[parent]
    lengths = torch.randint(1, 400, (len(parents),), generator=generator)
    own = torch.arange(len(parents)).repeat_interleave(lengths)
    return above[own[:, None], own].tril()


@pytest.mark.parametrize("seed", range(6))
def test_a_block_mask_says_what_the_dense_one_says(seed: int) -> None:
    dense = walked(torch.Generator().manual_seed(seed), 3)
    ends = dense.sum(0) + torch.arange(len(dense))  # who sees a token follows it without a gap
    mask = tree_mask(ends)
    count = -(-len(ends) // BLOCK)
    padded = torch.zeros(count * BLOCK, count * BLOCK, dtype=torch.bool)
    padded[: len(ends), : len(ends)] = dense
    blocks = padded.view(count, BLOCK, count, BLOCK).permute(0, 2, 1, 3)
    assert torch.equal(expanded(mask), dense)
    assert torch.equal(_dense_mask(ends[None])[0, 0], dense)
    assert int(mask.to_dense().sum()) == int(blocks.flatten(2).any(-1).sum())
    assert mask.full_kv_num_blocks is not None
    inside = torch.arange(count * BLOCK).view(count, 1, BLOCK, 1) < len(ends)  # a block may go beyond the sequence
    assert int(mask.full_kv_num_blocks.sum()) == int((blocks | ~inside).flatten(2).all(-1).sum())


def test_flex_attention_takes_the_mask_as_it_is_expanded() -> None:
    mask = tree_mask(torch.tensor([400] * 100 + [200] * 100 + [400] * 100 + [400] * 100))
    query, key, value = torch.randn(3, 1, 2, 400, 16).unbind()
    found: Any = flex_attention(query, key, value, block_mask=mask)
    torch.testing.assert_close(found, torch.nn.functional.scaled_dot_product_attention(query, key, value, expanded(mask)))


def test_packed_rows_need_no_mask_and_shared_ones_none_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(*(trajectory(turn([1] * 300, [3 + number] * 200)) for number in range(4)))
    layout = Layout(batch)
    apart = layout.micro_batch(one_row_bundles(batch), packed=True)
    assert apart.inputs()["attention_mask"] is None
    assert apart.inputs()["cu_seq_lens_q"].tolist() == [0, 499, 998, 1497, 1996]
    assert apart.inputs()["max_length_k"] == 499
    together = layout.micro_batch(share_prefixes(batch, budget=4000, hidden_size=64, costs=KERNELS["varlen"].costs), packed=True)
    assert together.input_ids.shape == (1, 300 + 4 * 199)
    mask = together.inputs()["attention_mask"]
    held = [mask.kv_indices, mask.full_kv_indices, mask.kv_num_blocks, together.ends]
    assert max(tensor.numel() for tensor in held if tensor is not None) <= together.num_tokens


def test_long_answers_to_a_short_prompt_share_it_where_the_kernel_skips_what_a_mask_hides() -> None:
    long, other = (trajectory(turn([1] * 400, [token] * 500)) for token in (3, 4))

    def shared(costs: Costs) -> bool:
        return len(share_prefixes(batch_of(long, other), budget=10**6, hidden_size=64, costs=costs)) == 1

    assert not shared(KERNELS["sdpa"].costs)
    assert shared(KERNELS["varlen"].costs)
    assert not shared(Costs(causal=1.0, masked=10.0, skips=True))


def test_the_kernel_follows_from_the_device() -> None:
    assert choose_kernel(LearnerConfig(), "cpu").name == "sdpa"
    assert choose_kernel(LearnerConfig(), "cuda").name == "varlen"
    assert choose_kernel(LearnerConfig(attn_implementation="eager"), "cuda").name == "eager"
    with pytest.raises(ConfigError, match="flash_attn"):
        choose_kernel(LearnerConfig(attn_implementation="flash_attention_2"), "cpu")


def test_micro_batches_go_to_the_device_one_at_a_time(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[MicroBatch] = []
    there = 0
    to = MicroBatch.to

    def count(self: MicroBatch, device: torch.device) -> MicroBatch:
        moved.append(self)
        return to(self, device)

    monkeypatch.setattr(MicroBatch, "to", count)

    def score(policy: PolicyModel, micro: MicroBatch) -> Any:
        nonlocal there
        there += 1
        assert len(moved) == there
        return forward(policy, micro)

    forward = PolicyModel.forward
    monkeypatch.setattr(PolicyModel, "forward", score)
    monkeypatch.setattr("agentrl.learner.state.check_output", lambda *_: None)
    gradients(make_settings(tiny_model, learner={"micro_batch_tokens": 30, "share_prompts": False}, algo={"mini_batches": 2}), GROUPS)
    assert there > 8


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tiles_of_an_mlp_change_no_gradient(tiny_model: str, stage: int) -> None:
    plain = gradients(make_settings(tiny_model), GROUPS)
    learner = {"zero_stage": stage, "gradient_checkpointing": True, "tiled_mlp": True}
    for budget in (1, 100):
        settings = make_settings(tiny_model, learner=learner | {"micro_batch_tokens": budget})
        assert largest_difference(plain, gradients(settings, GROUPS)) < 1e-5


def test_a_model_without_an_mlp_to_tile_is_refused() -> None:
    assert tile_mlps(tiny("Llama"))
    assert not tile_mlps(tiny("Phi"))


def by_2_11(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
            return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> Tensor:  # fmt: skip
    """torch 2.11's `varlen_attn` has these parameters, and wants as many heads of keys as of queries."""
    assert query.shape[1] == key.shape[1] == value.shape[1]
    return _reference(
        query, key, value, cu_seq_q, max_q, scale or 1.0, None if window_size[0] < 0 else window_size[0] + 1, None, capped=False
    )


def by_2_12(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
            return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
            seqused_k: Any = None, block_table: Any = None, num_splits: Any = None) -> Tensor:  # fmt: skip
    """The parameters of torch 2.12 and 2.13."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return _reference(
        query, key, value, cu_seq_q, max_q, scale or 1.0, None if window_size[0] < 0 else window_size[0] + 1, None, capped=False
    )


@pytest.mark.parametrize("kernel", [by_2_11, by_2_12])
@pytest.mark.parametrize(("key_heads", "window"), [(1, None), (2, 3), (4, None)])
def test_the_packed_kernel_is_called_by_the_signature_that_it_has(kernel: Any, key_heads: int, window: int | None) -> None:
    torch.manual_seed(0)
    bounds = torch.tensor([0, 5, 9], dtype=torch.int32)
    parts = [torch.randn(9, heads, 8, requires_grad=True) for heads in (4, key_heads, key_heads)]
    found, wanted = (
        _varlen_on_gpu(kernel, *parts, bounds, 5, 0.4, window),
        _reference(*parts, bounds, 5, 0.4, window, None, capped=False),
    )
    torch.testing.assert_close(found, wanted)
    ours, theirs = (torch.autograd.grad(output.square().sum(), parts) for output in (found, wanted))
    torch.testing.assert_close(ours, theirs)


def test_the_installed_kernel_takes_what_it_is_given() -> None:
    """On the meta device only shapes are computed, by the registered stand-in of the kernel."""
    from torch.nn.attention.varlen import varlen_attn

    query, key = torch.empty(9, 4, 8, device="meta"), torch.empty(9, 2, 8, device="meta")
    bounds = torch.empty(3, dtype=torch.int32, device="meta")
    assert _varlen_on_gpu(varlen_attn, query, key, key, bounds, 5, 0.4, 3).shape == query.shape
