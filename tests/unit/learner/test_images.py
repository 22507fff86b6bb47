"""Rows with images: every layout has the gradients of one row at a time, and the vision part stays as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.core.errors import ConfigError
from agentrl.core.model_shape import placeholder_ids
from agentrl.core.tokenizers import load_tokenizer
from agentrl.learner.attention import KERNELS
from agentrl.learner.batch import Batch, collate
from agentrl.learner.export import ALONE, save_pretrained
from agentrl.learner.kernels import set_kernel
from agentrl.learner.layout import Layout
from agentrl.learner.models import PolicyModel, load_model
from agentrl.learner.parameters import WHOLE
from agentrl.learner.trees import Bundle, one_row_bundles, share_prefixes
from agentrl.rollout.images import ImageReader, Processor, decoded
from tests.image_support import group_of_text, group_with_images, read, reader_of
from tests.learner_support import make_settings

WIDE = 10_000
"""Width of a model for which sharing a prompt is always worth it."""


@pytest.fixture(scope="module")
def reader(vision_model: str) -> ImageReader:
    return reader_of(vision_model)


@pytest.fixture(scope="module")
def batch(reader: ImageReader) -> Batch:
    return collate([group_with_images(reader, 0), group_of_text(1), group_with_images(reader, 2, own_first=True)])


def load(model: str, **changes: Any) -> Any:
    settings = make_settings(model, **changes)
    return load_model(settings, trained=True)


def gradients(policy: PolicyModel, batch: Batch, parts: list[list[Bundle]], *, packed: bool = False) -> tuple[Any, Any]:
    """Log-probabilities of all action tokens, and gradients of a weighted sum, over micro-batches."""
    policy.zero_grad()
    weights = torch.linspace(-1.0, 1.0, batch.num_actions)
    found = torch.zeros(batch.num_actions)
    for bundles in parts:
        micro = Layout(batch).micro_batch(bundles, packed=packed)
        new, _, _ = policy(micro)
        found[micro.actions] = new.detach()
        (new * weights[micro.actions]).sum().backward()
    return found, {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("train_vision", [False, True])
@pytest.mark.parametrize("layout", ["padded", "shared", "two at a time", "packed", "packed shared"])
def test_layouts_have_the_gradients_of_one_row_at_a_time(vision_model: str, batch: Batch, layout: str, train_vision: bool) -> None:
    model = load(vision_model, learner={"train_vision": train_vision})
    policy = PolicyModel(model)
    single = one_row_bundles(batch)
    expected = gradients(policy, batch, [[each] for each in single])
    packed = layout.startswith("packed")
    if packed:
        set_kernel(model, KERNELS["varlen"])
    shared = share_prefixes(batch, budget=10_000, hidden_size=WIDE)
    assert [bundle.shared for bundle in shared] == [(0, 12, 12), (0, 4, 4), (0, 1, 1)]  # rows part at pictures of their own
    parts = {"padded": [single], "shared": [shared], "packed": [single], "packed shared": [shared]}.get(layout)
    found = gradients(policy, batch, parts or [single[at : at + 2] for at in range(0, len(single), 2)], packed=packed)
    assert (found[0] - expected[0]).abs().max() < 1e-5
    assert found[1].keys() == expected[1].keys()
    assert any("connector" in name for name in found[1])
    assert any("vision_model" in name for name in found[1]) == train_vision
    assert max(float((found[1][name] - expected[1][name]).abs().max()) for name in expected[1]) < 1e-4


def test_an_image_of_a_shared_prompt_is_computed_once(batch: Batch) -> None:
    layout = Layout(batch)
    shared = layout.micro_batch(share_prefixes(batch, budget=10_000, hidden_size=WIDE), packed=False)
    alone = layout.micro_batch(one_row_bundles(batch), packed=False)
    assert (alone.pixels["pixel_values"].shape[1], shared.pixels["pixel_values"].shape[1]) == (12, 10)


def test_rows_without_images_run_the_vision_part_if_others_do(batch: Batch, reader: ImageReader) -> None:
    text = [bundle for bundle in one_row_bundles(batch) if bundle.group == 1]
    for bundles in ([], text):
        micro = Layout(batch).micro_batch(bundles, packed=False)
        assert micro.pixels["pixel_values"].shape[1] == 1
        assert len(micro.actions) == 2 * len(bundles)
    only_text = collate([group_of_text(0)])
    assert not Layout(only_text).micro_batch(one_row_bundles(only_text), packed=False).pixels


def test_scores_depend_on_the_picture(vision_model: str, reader: ImageReader) -> None:
    policy = PolicyModel(load(vision_model))
    groups = [collate([group_with_images(reader, number, members=2)]) for number in (0, 1)]
    with torch.no_grad():
        one, other = (policy(Layout(batch).micro_batch(one_row_bundles(batch), packed=False))[0] for batch in groups)
    assert (one - other).abs().max() > 1e-4


def test_placeholders_have_no_probability(vision_model: str, batch: Batch) -> None:
    policy = PolicyModel(load(vision_model))
    micro = Layout(batch).micro_batch(one_row_bundles(batch), packed=False)
    micro = replace(micro, targets=torch.full_like(micro.targets, placeholder_ids(policy.model.config)[0]))
    for whole in (True, False):
        policy.whole = whole
        with torch.no_grad():
            assert torch.isneginf(policy(micro)[0]).all()


def test_adapters_are_put_into_the_text_part_alone(vision_model: str) -> None:
    model = load(vision_model, lora={"lora_rank": 2})
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("text_model" in name and "lora" in name for name in trained)


def test_a_saved_model_has_its_processor(vision_model: str, tmp_path: Path, reader: ImageReader) -> None:
    model = load(vision_model)
    save_pretrained(model, WHOLE.named(model), load_tokenizer(vision_model), tmp_path / "model", ALONE)
    (before,) = read(reader, 7)
    saved = Processor(str(tmp_path / "model"), model.config).process(decoded(before.data, 2**20), before.data, "key")
    assert saved.token_ids.tolist() == before.token_ids.tolist()
    assert all((saved.tensors[name].array == tensor.array).all() for name, tensor in before.tensors.items())


def test_layers_and_tokens_of_images_cannot_be_divided(vision_model: str) -> None:
    from agentrl.learner.deepspeed.loading import _layers_can_be_divided, register_ulysses
    from agentrl.learner.ranks import Ranks
    from agentrl.learner.sequence import run_together

    settings = make_settings(vision_model, learner={"learner_tensor_parallel": 2, "num_learners": 2})
    with pytest.raises(ConfigError, match="reads images"):
        _layers_can_be_divided(settings)
    policy = PolicyModel(load(vision_model))
    ranks = Ranks(0, 2, torch.device("cpu"), sequence_parallel=2)
    with pytest.raises(ConfigError, match="reads images, which cannot be divided"):
        run_together(KERNELS["varlen"], register_ulysses, lambda micro: policy(micro)[0], [policy], ranks, 0.1)
