"""Processors of images: each image alone is what it is beside others, with its positions and marks, or the model is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.core.errors import ConfigError
from agentrl.core.images import (
    ImageInput,
    ImageTensor,
    check_places,
    image_arguments,
    joined_tensors,
    locate,
    positions_of,
    token_types_of,
)
from agentrl.core.types import ints
from agentrl.rollout import image_processor
from agentrl.rollout.image_processor import Processor
from tests.image_support import read, reader_of
from tests.vision_families import make_family


class Odd:
    """The processor of a model, changed."""

    def __init__(self, real: Any, change: Any) -> None:
        self._real, self._change = real, change
        self.image_processor, self.tokenizer = real.image_processor, real.tokenizer

    def __call__(self, **given: Any) -> Any:
        return self._change(self._real(**given), given["images"])


def _marking(found: Any, images: Any) -> Any:
    found["token_type_ids"] = found["input_ids"] * 0
    return found


def _other_tokens(found: Any, images: Any) -> Any:
    if len(images) > 1:
        found["input_ids"] = found["input_ids"].flip(1)
    return found


def _other_pixels(found: Any, images: Any) -> Any:
    found["pixel_values"] = found["pixel_values"] * len(images)
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_marking, r"marks the tokens of images \(token_type_ids\), and how its model attends to them is not known"),
        (_other_tokens, "writes other tokens for several images than for each alone"),
        (_other_pixels, "makes another pixel_values of several images than of each alone"),
    ],
)
def test_processors_that_make_other_images_in_company_are_refused(
    vision_model: str, monkeypatch: pytest.MonkeyPatch, change: Any, words: str
) -> None:
    config = json.loads((Path(vision_model) / "config.json").read_text())
    load = image_processor.load_processor
    monkeypatch.setattr(image_processor, "load_processor", lambda model, **options: Odd(load(model, **options), change))
    with pytest.raises(ConfigError, match=words):
        Processor(vision_model, config)


def test_a_processor_may_fill_up_small_images_beside_large_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def filled(found: Any, images: Any) -> Any:  # as Pixtral's does, which needs torchvision
        sides = [min(8, image.width // 10) for image in images]
        for values, side in zip(found["pixel_values"], sides, strict=True):
            values[:, side:, :], values[:, :, side:] = 0, 0
        found["pixel_values"] = found["pixel_values"][:, :, : max(sides), : max(sides)]
        return found

    load = image_processor.load_processor
    monkeypatch.setattr(image_processor, "load_processor", lambda model, **options: Odd(load(model, **options), filled))
    model = str(make_family("llava", tmp_path))
    processor = Processor(model, json.loads((tmp_path / "config.json").read_text()))
    assert processor._tensors["pixel_values"] == (0, True)


def test_a_processor_that_replaces_another_token_is_refused(vision_model: str) -> None:
    config = json.loads((Path(vision_model) / "config.json").read_text()) | {"image_token_id": 7}
    with pytest.raises(ConfigError, match="its processor replaces the token <image> by an image, and its configuration names"):
        Processor(vision_model, config)


def test_positions_of_images_are_those_of_the_models_own_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(make_family("qwen2_5_vl", tmp_path))
    reader = reader_of(model)
    one, other = read(reader, 1, 2)
    ids, placed = reader.expand([3, reader.placeholder, 20, reader.placeholder, 4, 5], [one, other])
    positions = positions_of(len(ids) + 1, placed)
    assert positions.shape == (3, len(ids) + 1)
    assert positions[:, 1:5].tolist() == [[1, 1, 1, 1], [1, 1, 2, 2], [1, 2, 1, 2]]
    assert positions[:, 5:7].tolist() == [[3, 4]] * 3
    assert positions_of(4, (), axes=3).tolist() == [[0, 1, 2, 3]] * 3
    monkeypatch.setattr(image_processor, "positions_of", lambda count, placed: np.tile(np.arange(count), (3, 1)))
    with pytest.raises(ConfigError, match="other positions in a prompt than alone"):
        Processor(model, json.loads((tmp_path / "config.json").read_text()))


def test_positions_count_from_the_first_token_wherever_the_models_own_function_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(make_family("qwen2_5_vl", tmp_path))
    config, find = json.loads((tmp_path / "config.json").read_text()), image_processor.rope_index

    def moved(config: Any) -> Any:
        index = find(config)

        def positions(**given: Any) -> Any:
            found, deltas = index(**given)
            return found + 5, deltas

        return positions

    plain = Processor(model, config)
    monkeypatch.setattr(image_processor, "rope_index", moved)
    image = image_processor._drawn(56, 56)
    found = [processor.process(image, b"", "k").positions for processor in (plain, Processor(model, config))]
    assert np.array_equal(*found)  # type: ignore[arg-type]


def test_a_place_of_an_image_may_be_another_token_than_its_pixels(tmp_path: Path) -> None:
    reader = reader_of(str(make_family("gemma3", tmp_path)))
    (image,) = read(reader, 1)
    config = json.loads((tmp_path / "config.json").read_text())
    assert image.placeholder == reader.placeholder == config["boi_token_index"] != config["image_token_index"]
    ids, placed = reader.expand([3, reader.placeholder, 4], [image])
    pixels = [int(token == config["image_token_index"]) for token in ids]
    assert token_types_of(len(ids), placed)["token_type_ids"].tolist() == pixels
    assert sum(pixels) == 4
    check_places("r", ints(ids), placed, [config["image_token_index"]])


def test_arguments_of_padded_rows_are_those_of_each_row(tmp_path: Path) -> None:
    reader = reader_of(str(make_family("qwen2_5_vl", tmp_path)))
    images = read(reader, 1, 2)
    rows = [reader.expand([3, reader.placeholder, 4], images[:1]), reader.expand([3, 4, reader.placeholder], images[1:]), ([3], ())]
    found = image_arguments(9, [placed for _, placed in rows])
    assert found["image_grid_thw"].shape == (2, 3)
    for number, (ids, placed) in enumerate(rows):
        assert np.array_equal(found["position_ids"][:, number], positions_of(9, placed, 3))
        assert locate(ids, [each.image for each in placed]) == placed
    assert image_arguments(9, [()]) == {}
    with pytest.raises(ValueError, match="tokens of image 0 are not in the prompt"):
        locate([3, 4], images)


def test_the_same_image_twice_is_in_two_places() -> None:
    image = ImageInput(key="k", data=b"", token_ids=ints([7, 8]), placeholder=7, tensors={})
    assert [each.place for each in locate([3, 7, 8, 4, 7, 8], [image, image])] == [1, 4]


def test_images_of_several_sizes_are_filled_up_where_the_processor_does_so() -> None:
    def image(side: int, *, is_padded: bool) -> ImageInput:
        tensor = ImageTensor(np.ones((1, side, side), dtype=np.float32), 0, is_padded)
        return ImageInput(key=str(side), data=b"", token_ids=ints([7]), placeholder=7, tensors={"pixel_values": tensor})

    joined = joined_tensors([image(2, is_padded=True), image(3, is_padded=True)])["pixel_values"]
    assert joined.shape == (2, 3, 3)
    assert (joined[0].sum(), joined[0, :2, :2].sum()) == (4, 4)
    with pytest.raises(ValueError, match="dimension"):
        joined_tensors([image(2, is_padded=False), image(3, is_padded=False)])
