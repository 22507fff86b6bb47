"""The bundled vision model: the rows that it is made of are true of their pictures, and it answers by what it sees."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from agentrl import Task
from agentrl.assets import VISION_MODEL, located_model
from agentrl.core.tokenizers import load_tokenizer
from envs import picture_grid, shapes
from examples.vision_model import corpus
from tests.image_support import reader_of


def quarter(picture: np.ndarray, x: int, y: int) -> np.ndarray:
    return picture[y - 16 : y + 16, x - 16 : x + 16]


def test_what_is_said_of_shapes_is_in_their_picture() -> None:
    for seed in range(100):
        turns = corpus.shapes_turns(Random(seed))
        picture = turns[0][1]
        answers = {text: answer for text, _, answer in turns}
        words = iter(answers[corpus.LIST].split())
        named = [(colour, "" if colour == "no" else next(words)) for colour in words]
        assert len(named) == len(shapes.QUARTERS)
        for (colour, _), place in zip(named, shapes.QUARTERS, strict=True):
            most = (quarter(picture, *place) == shapes.COLOURS.get(colour, (24, 24, 24))).all(-1).sum()
            assert most > 90
        if "How many?" in answers:
            assert answers["How many?"] == str(sum(colour != "no" for colour, _ in named))
        for form in shapes.FORMS:
            if f"What colour is the {form}?" in answers:
                assert [colour for colour, name in named if name == form] == [answers[f"What colour is the {form}?"]]
            if f"Where is the {form}?" in answers:
                place = [name for _, name in named].index(form)
                assert answers[f"Where is the {form}?"] == ("left", "right")[place % 2]


def test_what_is_said_of_a_walk_is_in_its_pictures() -> None:
    for seed in range(100):
        picture = None
        for text, shown, answer in corpus.grid_turns(Random(seed)):
            picture = picture if shown is None else shown
            if text == corpus.WHERE:
                x, y, right, down = map(int, answer.split())
                assert np.array_equal(picture, picture_grid.draw((x, y), (right, down)))


@pytest.mark.parametrize(("share", "right"), [(0.0, 1.0), (1.0, 1 / 3)])
def test_a_share_of_the_answers_of_the_last_phase_is_random(share: float, right: float) -> None:
    rng, same = Random(0), []
    for _ in range(300):
        state = rng.getstate()
        task = shapes.make_task(rng)
        rng.setstate(state)
        ((_, picture, answer),) = corpus.shapes_question(rng, share)
        assert np.array_equal(picture, task.images[0])
        same.append(answer == task.label)
    assert statistics.fmean(same) == pytest.approx(right, abs=0.08)


@torch.no_grad()
def probability(model: Any, tasks: Sequence[Task], pictures: Sequence[Any]) -> float:
    """Mean probability of the right answers, each of one token, to questions beside pictures."""
    path = located_model(VISION_MODEL)
    reader, tokenizer, found = reader_of(path), load_tokenizer(path), []
    for task, image in zip(tasks, reader.read_here(pictures), strict=True):
        asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": str(task.prompt)}]}]
        compact = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        ids, _ = reader.expand(compact, [image])
        pixels = {name: torch.tensor(tensor.array) for name, tensor in image.tensors.items()}
        chances = model(input_ids=torch.tensor([ids]), **pixels).logits[0, -1].softmax(-1)
        (answer,) = tokenizer.encode(str(task.label), add_special_tokens=False)
        found.append(float(chances[answer]))
    return statistics.fmean(found)


def test_the_bundled_model_sees_and_has_much_to_learn() -> None:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(located_model(VISION_MODEL)).eval()
    tasks = shapes.make_tasks(1, 96)
    pictures = [task.images[0] for task in tasks]
    own, others = probability(model, tasks, pictures), probability(model, tasks, [*pictures[1:], pictures[0]])
    assert own - others > 0.15
    assert 0.4 < own < 0.6
    assert Path(located_model(VISION_MODEL), "model.safetensors").stat().st_size < 5 * 2**20
