"""Features of images in prompts of which an engine has computed the beginning."""

from __future__ import annotations

import torch

from agentrl.engine.image_features import ImageFeatures
from tests.image_support import read, reader_of


def test_a_prompt_may_go_on_within_an_image(vision_model: str) -> None:
    from transformers import AutoModelForImageTextToText

    reader = reader_of(vision_model)
    ids, placed = reader.expand([3, reader.placeholder, 20, reader.placeholder, 4], read(reader, 1, 2))
    features = ImageFeatures(AutoModelForImageTextToText.from_pretrained(vision_model).eval())
    with torch.no_grad():
        whole = features.embedded(torch.tensor([ids]), [(0, 0, placed)])
        for known in range(1, len(ids)):
            assert torch.equal(features.embedded(torch.tensor([ids[known:]]), [(0, known, placed)]), whole[:, known:])
