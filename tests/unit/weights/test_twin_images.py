"""Twins of models that read images: they read images themselves, on which layouts are proven."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from agentrl.learner.attention import KERNELS
from agentrl.learner.kernels import Proof
from agentrl.weights.twin import build_twin, parameters_of, twin_config, twin_of
from agentrl.weights.twin_images import drawn_images, vision_twin_config

TOKENS = {"idefics3": [4, 4], "qwen2_vl": [4, 6], "qwen2_5_vl": [4, 6], "qwen3_vl": [4, 6], "gemma3": [4, 4], "gemma4": [4, 6]}
TOKENS |= {"llava": [16, 16], "internvl": [4, 4], "mistral3": [4, 6]}
"""Families, and the tokens of the two images of a twin."""


def twin(name: str) -> Any:
    own = {"vision_config": CONFIG_MAPPING["gemma4_vision"](), "text_config": {"use_bidirectional_attention": "vision"}}
    config = CONFIG_MAPPING[name](**(own if name == "gemma4" else {}))
    made = vision_twin_config(config, twin_config(config.get_text_config()))
    return build_twin(made, AutoModelForImageTextToText._model_mapping[type(config)]).eval()


@pytest.mark.parametrize("name", TOKENS)
def test_a_twin_reads_images(name: str) -> None:
    made = twin(name)
    images = drawn_images(made)
    assert [len(each.token_ids) for each in images] == TOKENS[name]
    assert all((each.positions is not None) == name.startswith("qwen") for each in images)
    assert all(bool(each.token_types) == name.startswith("gemma") for each in images)
    assert parameters_of(made) < 1_000_000
    assert type(twin_of(made)) is type(made)


def test_a_vision_part_of_another_form_leaves_the_twin_of_the_text_part() -> None:
    config = CONFIG_MAPPING["lfm2_vl"]()
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    small = twin_of(model)
    assert small is not None
    assert getattr(small.config, "vision_config", None) is None


def counted_images(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Proof, list[int]]:
    proof, seen = Proof(twin(name), torch.device("cpu")), list[int]()
    small: Any = proof._small
    compute = small.model.get_image_features

    def counted(pixel_values: Any, *args: Any, **named: Any) -> Any:
        seen.append(len(pixel_values))
        return compute(pixel_values, *args, **named)

    monkeypatch.setattr(small.model, "get_image_features", counted)
    return proof, seen


def test_layouts_are_proven_on_rows_with_images_in_prompts_and_later_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    proof, seen = counted_images("llava", monkeypatch)
    for name, share, count in (("eager", False, 7), ("varlen", False, 7), ("varlen", True, 4)):
        seen.clear()
        assert proof.problem(KERNELS[name], share=share) == ""
        assert seen == [count]  # four prompts, of which one is enough where it is shared, and three later turns


def test_attention_in_both_directions_allows_neither_packed_rows_nor_shared_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    proof, _ = counted_images("gemma3", monkeypatch)
    assert proof.problem(KERNELS["sdpa"]) == ""
    for name, share in (("sdpa", True), ("varlen", False), ("varlen", True)):
        problem = proof.problem(KERNELS[name], share=share)
        assert problem.startswith("tokens of an image attend to each other in both directions in Gemma3"), problem
