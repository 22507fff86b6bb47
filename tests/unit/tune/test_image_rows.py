"""Rows with images in supervised training: tokens of images are not trained, and pictures go to the model in their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentrl.config.tune import SftConfig, SftDataConfig
from agentrl.core.errors import DataError
from agentrl.core.tokenizers import load_tokenizer
from agentrl.env.images import image_text
from agentrl.learner.layout import Layout
from agentrl.learner.trees import one_row_bundles
from agentrl.rollout.images import ImageReader
from agentrl.rollout.text_codec import TextCodec
from agentrl.tune.columns import RowError
from agentrl.tune.forms import dialogue
from agentrl.tune.learner_rows import RowMaker
from agentrl.tune.row_table import as_rows, fingerprint
from agentrl.tune.row_text import IGNORED
from tests.image_support import picture, reader_of
from tests.unit.tune.plans import encoder_of

PICTURES = [image_text(picture(seed)) for seed in range(2)]
CHAT = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
    {"role": "assistant", "content": "red"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "blue"},
]


@pytest.fixture(scope="module")
def reader(vision_model: str) -> ImageReader:
    return reader_of(vision_model)


@pytest.fixture(scope="module")
def codec(vision_model: str) -> TextCodec:
    return TextCodec(load_tokenizer(vision_model))


def encoded(codec: TextCodec, reader: ImageReader | None, row: dict[str, Any], **data: Any) -> list[dict[str, Any]]:
    config = SftConfig(data=SftDataConfig(**data))
    return list(as_rows(encoder_of(codec, config, reader).encode(dialogue(row, config.data))))


def test_a_chat_has_its_images_where_its_parts_are(codec: TextCodec, reader: ImageReader) -> None:
    (row,) = encoded(codec, reader, {"messages": CHAT, "images": PICTURES[:1]})
    (image,) = reader.read_here(PICTURES[:1])
    count = len(image.token_ids)
    begin = row["input_ids"].index(int(image.token_ids[0]))
    assert row["input_ids"][begin : begin + count] == image.token_ids.tolist()
    assert row["labels"][begin : begin + count] == [IGNORED] * count
    assert len(row["labels"]) == len(row["input_ids"])
    assert codec.decode([label for label in row["labels"] if label != IGNORED]) == "red<|end|>blue<|end|>"
    assert row["images"] == PICTURES[:1]


def test_images_without_parts_come_first_and_a_completion_may_have_some(codec: TextCodec, reader: ImageReader) -> None:
    plain = [{"role": "user", "content": "What?"}, CHAT[1]]
    completion = {"prompt": "What?", "completion": "red", "image": PICTURES[0]}
    (one,), (other,) = encoded(codec, reader, {"messages": plain, "images": PICTURES[:1]}), encoded(codec, reader, completion)
    assert one["input_ids"] == other["input_ids"]
    assert one["labels"] == other["labels"]


def test_batches_have_the_pixels_of_all_rows_in_order(codec: TextCodec, reader: ImageReader) -> None:
    rows = [encoded(codec, reader, {"messages": CHAT, "images": [name]})[0] for name in PICTURES]
    made = RowMaker("sft", reader)(rows)
    found = Layout(made).micro_batch(one_row_bundles(made), packed=False).inputs()["pixel_values"]
    expected = [torch.tensor(image.tensors["pixel_values"].array) for image in reader.read_here(PICTURES)]
    assert torch.equal(found, torch.cat(expected, 1))
    assert RowMaker("sft", reader)([{"input_ids": [1, 2], "labels": [1, 2]}]).first_image() is None


def test_marks_and_the_form_of_sharegpt_say_where_images_are(codec: TextCodec, reader: ImageReader) -> None:
    marked = [{"role": "user", "content": "<image>What?"}, *CHAT[1:]]
    names = {"user": "human", "assistant": "gpt"}
    shared = [{"from": names[message["role"]], "value": message["content"]} for message in marked]
    plain, *others = [encoded(codec, reader, {"messages": chat, "images": PICTURES[:1]})[0] for chat in (CHAT, marked, shared)]
    assert others == [plain, plain]
    (conversations,) = encoded(codec, reader, {"conversations": shared, "images": PICTURES[:1]})
    assert conversations == plain
    with pytest.raises(RowError, match="1 marks <image> and there are 2 images"):
        dialogue({"messages": marked, "images": PICTURES}, SftDataConfig())


def test_a_template_that_leaves_images_out_is_refused(codec: TextCodec, reader: ImageReader, vision_model: str) -> None:
    tokenizer = load_tokenizer(vision_model)
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ '<image>' }}", "")
    blind = TextCodec(tokenizer)
    for row in ({"messages": CHAT, "images": PICTURES[:1]}, {"prompt": "What?", "completion": "red", "image": PICTURES[0]}):
        with pytest.raises(DataError, match="the chat template writes 0 placeholders of images, and there are 1 images"):
            encoded(blind, reader, row)


def test_a_row_whose_images_do_not_fit_is_left_out_whole(codec: TextCodec, reader: ImageReader) -> None:
    (row,) = encoded(codec, reader, {"messages": CHAT, "images": PICTURES[:1]})
    with pytest.raises(DataError, match="leaves no row"):
        encoded(codec, reader, {"messages": CHAT, "images": PICTURES[:1]}, max_length=len(row["input_ids"]) - 1, overlong="cut")


@pytest.mark.parametrize(("images", "words"), [(PICTURES, "1 parts for images"), ([], "1 parts for images"), ([3], "is no image")])
def test_images_that_do_not_fit_their_parts_are_refused(images: list[Any], words: str) -> None:
    with pytest.raises(RowError, match=words):
        dialogue({"messages": CHAT, "images": images}, SftDataConfig())


def test_damaged_images_and_models_of_text_are_refused_by_name(codec: TextCodec, reader: ImageReader) -> None:
    with pytest.raises(DataError, match="no image that can be read"):
        encoded(codec, reader, {"messages": CHAT, "images": [b"nothing"]})
    with pytest.raises(DataError, match="1 images, and the model reads no images"):
        encoded(codec, None, {"messages": CHAT, "images": PICTURES[:1]})


def test_text_that_spells_a_placeholder_in_raw_text_is_refused(codec: TextCodec, reader: ImageReader) -> None:
    with pytest.raises(DataError, match="1 placeholders of images, and there are 0 images"):
        encoded(codec, reader, {"text": "A <image> here"})


def test_another_picture_is_other_data(codec: TextCodec, reader: ImageReader) -> None:
    one, other = (encoded(codec, reader, {"messages": CHAT, "images": [name]}) for name in PICTURES)
    assert fingerprint(one) != fingerprint(other)
