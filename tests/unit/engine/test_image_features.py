"""Images in prompts of the engine of transformers: computed once, and never in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from agentrl.core.images import PlacedImage
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import Sampling, ints
from agentrl.engine.image_features import ImageFeatures, with_images
from agentrl.engine.prefill import _outside
from agentrl.engine.sequences import Sequence
from agentrl.engine.slots import Step
from agentrl.rollout.images import ImageReader
from tests.image_support import read, reader_of
from tests.vision_families import make_family


def loaded(model: str) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(model).eval()


def prompt(reader: ImageReader, *seeds: int) -> tuple[list[int], tuple[PlacedImage, ...]]:
    mark = reader.placeholder
    return reader.expand([3, *(token for _ in seeds for token in (mark, 20)), 4], read(reader, *seeds))


def test_features_of_images_are_kept_and_are_those_of_the_model(vision_model: str) -> None:
    ids, placed = prompt(reader_of(vision_model), 1, 2)
    own, model = loaded(vision_model), loaded(vision_model)
    arrays = {name: torch.cat([torch.from_numpy(each.image.tensors[name].array) for each in placed], 1) for name in placed[0].image.tensors}
    calls, compute = [], model.base_model.get_image_features
    model.base_model.get_image_features = lambda *args, **named: (calls.append(1), compute(*args, **named))[1]
    features = ImageFeatures(model)
    with torch.no_grad():
        expected = own(input_ids=torch.tensor([ids]), **arrays).logits
        for _ in range(2):
            found = model(input_ids=torch.tensor([ids]), **features.arguments([(0, 0, placed)])).logits
            assert torch.allclose(found, expected, atol=1e-5)
    assert len(calls) == 2  # once for each image
    assert features.arguments([(0, placed[-1].end, placed)]) == {}  # both are known
    features.forget()
    features.arguments([(0, placed[0].end, placed)])
    assert len(calls) == 3


def test_a_common_beginning_never_ends_within_an_image(vision_model: str) -> None:
    ids, placed = prompt(reader_of(vision_model), 1)
    (image,) = placed
    request = GenerationRequest(request_id="r", prompt_ids=ints(ids), sampling=Sampling(), placed=placed)
    sequence: Any = Sequence(request=request, answer=None, ids=ids, budget=1, ends=frozenset(), uniform=None)  # type: ignore[arg-type]
    found = [_outside(known, sequence) for known in range(len(ids))]
    assert found == [known if known <= image.place or known >= image.end else image.place for known in range(len(ids))]


def test_text_behind_an_image_has_the_positions_of_the_model(tmp_path: Path) -> None:
    reader = reader_of(str(make_family("qwen2_5_vl", tmp_path)))
    ids, placed = prompt(reader, 1, 2)
    model = loaded(str(tmp_path)).model
    grids = torch.cat([torch.from_numpy(each.image.tensors["image_grid_thw"].array) for each in placed])
    tokens = torch.tensor([[*ids, 30, 31]])
    expected, _ = model.get_rope_index(tokens, (tokens == reader.placeholder).int(), image_grid_thw=grids)
    for known, count in ((0, len(ids) + 2), (3, 5), (len(ids) - 1, 1), (len(ids) + 1, 1)):
        step = Step(torch.tensor([0]), torch.tensor([known]), torch.tensor([count]), count, 64)
        assert torch.equal(with_images(step, [(0, known, placed)], "").positions(), expected[:, :, known : known + count])


def test_tokens_of_an_image_are_a_block(tmp_path: Path) -> None:
    reader = reader_of(str(make_family("gemma3", tmp_path)))
    ids, placed = prompt(reader, 1, 2)
    step = Step(torch.tensor([0]), torch.tensor([0]), torch.tensor([len(ids)]), len(ids), 64)
    blocks = with_images(step, [(0, 0, placed)], "all").blocks
    assert blocks is not None
    pixels = torch.tensor(ids) == reader._processor._pixels
    assert torch.equal(blocks[0, : len(ids)] >= 0, pixels)
    assert [int((blocks == number).sum()) for number in (0, 1, 2)] == [4, 4, 0]
    assert with_images(step, [(0, placed[-1].end, placed)], "all").blocks is None
    assert with_images(step, [(0, 0, placed)], "").blocks is None
