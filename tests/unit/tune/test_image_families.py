"""Rows of given data for families with positions in space, or attention in both directions, against their own passes over one row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from agentrl.env.images import image_text
from agentrl.learner.layout import Layout
from agentrl.learner.models import PolicyModel
from agentrl.learner.trees import one_row_bundles
from agentrl.tune.learner_rows import RowMaker
from tests.image_support import picture, reader_of
from tests.vision_families import REQUIRED, make_family, own_arguments

PICTURES = [image_text(picture(seed)) for seed in range(3)]


@pytest.mark.parametrize("family", REQUIRED)
def test_rows_are_computed_as_the_model_computes_each(family: str, tmp_path: Path) -> None:
    path = str(make_family(family, tmp_path / family))
    reader, model = reader_of(path), AutoModelForImageTextToText.from_pretrained(path).eval()
    mark, rows, expected = reader.placeholder, [], []
    for compact, names in (([3, mark, 20, 4, 9], PICTURES[:1]), ([3, mark, 20, mark, 21, 4, 30, 31, 1], PICTURES[1:])):
        images = reader.read_here(names)
        ids, placed = reader.expand(compact, images)
        behind = placed[-1].end
        rows.append({"input_ids": ids, "labels": [-100] * behind + ids[behind:], "images": names})
        tokens = torch.tensor(ids)[None]
        with torch.no_grad():
            logits = model(input_ids=tokens, **own_arguments(reader, images, tokens)).logits[0, behind - 1 : -1]
        expected.append(logits.log_softmax(-1).gather(-1, tokens[0, behind:, None])[:, 0])
    made = RowMaker("sft", reader)(rows)
    with torch.no_grad():
        found = PolicyModel(model, samples=False)(Layout(made).micro_batch(one_row_bundles(made), packed=False))[0]
    assert (found - torch.cat(expected)).abs().max() < 1e-4
