"""Families of models that read images: every layout that the learner chooses has the gradients of the model's own passes over one row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.core.errors import ConfigError
from agentrl.learner.batch import Batch, collate
from agentrl.learner.head import token_scores
from agentrl.learner.kernels import fit_kernel
from agentrl.learner.layout import Layout
from agentrl.learner.models import PolicyModel, load_model
from agentrl.learner.trees import Bundle, one_row_bundles, share_prefixes
from agentrl.rollout.images import ImageReader
from tests.image_support import group_of_text, group_with_images, reader_of
from tests.learner_support import make_settings
from tests.vision_families import FAMILIES, make_family, own_arguments

WIDE = 10_000
"""Width of a model for which sharing a prompt is always worth it."""
PACKED = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "internvl", "pixtral"}
"""Families whose rows may follow each other in one sequence."""


class Family:
    """A small model of a family with rows of text and images."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.path = name, str(make_family(name, folder))
        self.reader: ImageReader = reader_of(self.path)
        groups = [group_with_images(self.reader, 0), group_of_text(1), group_with_images(self.reader, 2, own_first=True)]
        self.batch: Batch = collate(groups)

    def learner(self, kernel: str, **changes: Any) -> tuple[PolicyModel, bool, bool]:
        """The policy as a learner loads it, whether its rows are packed, and whether prompts are shared."""
        settings = make_settings(self.path, learner={"attn_implementation": kernel, "train_vision": True, **changes})
        policy = PolicyModel(load_model(settings, trained=True)).train()
        engine: Any = lambda micro: policy(micro)  # noqa: E731 - a function takes the attributes below
        engine.ranks, engine.module = SimpleNamespace(device=torch.device("cpu")), policy
        chosen, shares = fit_kernel(settings, engine, [policy], share=True)
        return policy, chosen.packed, shares


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp("family") / request.param)


def expected_scores(family: Family, kernel: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities and gradients of transformers' own forward pass, which finds positions and masks itself, one row at a time."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(family.path, attn_implementation=kernel, dtype=torch.float32).eval()
    batch, found = family.batch, []
    weights, begin = torch.linspace(-1.0, 1.0, batch.num_actions), 0
    for row in batch.rows:
        ids, places = torch.tensor(row.tokens.tolist())[None], torch.tensor(row.action_positions.tolist())
        logits = model(input_ids=ids, use_cache=False, **own_arguments(family.reader, [each.image for each in row.images], ids)).logits[
            0, places - 1
        ]
        logits[:, list(PolicyModel(model)._excluded)] = float("-inf")
        scores = token_scores(logits, ids[0, places], torch.ones(len(places)), False)[0]
        (scores * weights[begin : begin + len(places)]).sum().backward()
        begin += len(places)
        found.append(scores.detach())
    return torch.cat(found), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def learner_scores(policy: PolicyModel, batch: Batch, parts: list[list[Bundle]], packed: bool) -> tuple[Tensor, dict[str, Tensor]]:
    policy.zero_grad()
    weights, found = torch.linspace(-1.0, 1.0, batch.num_actions), torch.zeros(batch.num_actions)
    for bundles in parts:
        micro = Layout(batch).micro_batch(bundles, packed=packed)
        new, _, _ = policy(micro)
        found[micro.actions] = new.detach()
        (new * weights[micro.actions]).sum().backward()
    return found, {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


def layouts(batch: Batch, shares: bool) -> Iterator[list[list[Bundle]]]:
    single = one_row_bundles(batch)
    yield [single]
    yield [single[at : at + 2] for at in range(0, len(single), 2)]
    if shares:
        yield [share_prefixes(batch, budget=10_000, hidden_size=WIDE)]


def test_every_layout_has_the_gradients_of_the_models_own_passes(family: Family) -> None:
    expected = {kernel: expected_scores(family, kernel) for kernel in ("eager", "sdpa")}  # which may take another exponential on a CPU
    for kernel in ("eager", "sdpa", "varlen"):
        if kernel == "varlen" and family.name not in PACKED:
            with pytest.raises(ConfigError, match="tokens of an image attend to each other in both directions"):
                family.learner(kernel)
            continue
        policy, packed, shares = family.learner(kernel)
        logprobs, gradients = expected.get(kernel, expected["eager"])
        assert (packed, shares) == (kernel == "varlen", kernel != "eager" and family.name in PACKED)
        for parts in layouts(family.batch, shares):
            found, own = learner_scores(policy, family.batch, parts, packed)
            assert (found - logprobs).abs().max() < 1e-4
            assert own.keys() == gradients.keys()
            assert max(float((own[name] - gradients[name]).abs().max()) for name in own) < 1e-4
